"""Parameters that several layers share: gradients of all uses add up, within a stage and across stages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gpipe_fast.runtime.plan
from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.runtime.stage import Stage
from tests.inside import delay
from tests.reference import error, loop_step, pipeline_step, unequal
from tests.untraceable import Of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*micro-batches on:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*runs in Python:UserWarning"),
]

VOCABULARY, WIDTH, M = 11, 8, 4


def language_model() -> nn.Sequential:
    """The head's weight is the embedding's."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), head)


def tokens(batch: int = 8) -> Tensor:
    return torch.randint(VOCABULARY, (batch, 5), generator=torch.Generator().manual_seed(1))


def check(model: nn.Sequential, pipe: GPipe, tied: set[str]) -> None:
    """Asserts the plain loop's numbers; of tied parameters all but the order of sums."""
    expected, ours = loop_step(model, tokens(), M), pipeline_step(pipe, tokens())
    assert set(unequal(ours, expected)) <= {f"gradient of {name}" for name in tied}
    exact = model.double()
    truth = loop_step(exact, tokens(), M)
    model.float()
    off, allowed = error(ours, truth), error(expected, truth)
    assert all(off[name] <= 2 * allowed[name] for name in off)


@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize("balance", [[2, 3], [1, 2, 2], [1] * 5], ids=str)
def test_across_stages(balance: list[int], backend: str) -> None:
    model = language_model()
    pipe = GPipe(model, balance, chunks=M, backend=backend)
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
    for mode in CHECKPOINT_MODES:
        pipe.checkpoint = mode
        check(model, pipe, {"0.weight"})


@pytest.mark.parametrize("balance", [[5], [5, 1]], ids=str)
def test_within_a_stage_bit_for_bit(balance: list[int]) -> None:
    model = language_model()
    if len(balance) > 1:
        model.append(nn.Linear(VOCABULARY, 3))
    pipe = GPipe(model, balance, chunks=M, backend="aten")
    for mode in CHECKPOINT_MODES:
        pipe.checkpoint = mode
        assert unequal(pipeline_step(pipe, tokens()), loop_step(model, tokens(), M)) == []


def test_a_step_is_the_same_from_run_to_run() -> None:
    """The order of the sum over stages is fixed, whatever the timing."""
    pipe = GPipe(language_model(), [1, 2, 2], chunks=M, backend="aten")
    first = pipeline_step(pipe, tokens())
    for seed in range(5):
        delay(pipe, seed + 1, longest_us=300)
        assert unequal(pipeline_step(pipe, tokens()), first) == []


def test_updates_reach_every_use() -> None:
    """Three steps of an optimizer, which sees the parameter once."""
    model, other = language_model(), language_model()
    pipe = GPipe(other, [1, 2, 2], chunks=M)
    losses: list[list[float]] = []
    for module in (model, pipe):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            parts = tokens().chunk(M)
            output = module(tokens()) if module is pipe else torch.cat([model(c) for c in parts])
            loss = output.square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert other[0].weight is other[4].weight
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][2] < losses[0][0]


def test_a_use_without_a_gradient() -> None:
    """The embedding's use alone gets none: it is detached before the second stage."""
    model = language_model()
    model[1] = Of(lambda f, x: f(x.detach()), nn.Linear(WIDTH, WIDTH))
    pipe = GPipe(model, [1, 2, 2], chunks=M)
    check(model, pipe, set())


def test_hooks_see_the_whole_gradient_once() -> None:
    """Also where both uses are in Python, in stages that run at once."""
    for backend in ("aten", "eager"):
        model, seen = language_model(), []
        pipe = GPipe(model, [1, 2, 2], chunks=M, backend=backend)
        handle = model[0].weight.register_hook(lambda g, seen=seen: seen.append(g.clone()))
        pipe(tokens()).square().mean().backward()
        handle.remove()
        assert len(seen) == 1
        assert torch.equal(seen[0], model[0].weight.grad)


def tied_across_devices(monkeypatch: pytest.MonkeyPatch) -> nn.Sequential:
    """A model whose head counts as on another device than the embedding, though both are on the CPU.

    All stages but the first then compute with a copy of the parameter that is the weight of both.
    """
    model = language_model()
    shared = model[0].weight

    def is_elsewhere(tensor: Tensor, stage: Stage) -> bool:
        return tensor is shared and stage.first_layer > 0

    monkeypatch.setattr(gpipe_fast.runtime.plan, "is_elsewhere", is_elsewhere)
    return model


@pytest.mark.parametrize("balance", [[2, 3], [1, 2, 2]], ids=str)
def test_replicas_on_other_devices(balance: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients go to the one parameter; updates, of whatever sort, reach the copies."""
    model = tied_across_devices(monkeypatch)
    pipe = GPipe(model, balance, chunks=M, backend="aten")
    for mode in CHECKPOINT_MODES:
        pipe.checkpoint = mode
        check(model, pipe, {"0.weight"})
        with torch.no_grad():
            model[0].weight.mul_(1.5)
        check(model, pipe, {"0.weight"})
        model[0].weight.data.mul_(0.5)  # which no version counter shows
        check(model, pipe, {"0.weight"})
        model[0].weight.data = torch.randn(VOCABULARY, WIDTH)
        check(model, pipe, {"0.weight"})


def give_other_data(parameter: Tensor) -> None:
    parameter.data = torch.zeros(VOCABULARY, WIDTH)


def write_in_place(parameter: Tensor) -> None:
    parameter.data.zero_()


@pytest.mark.parametrize("change", [give_other_data, write_in_place])
@pytest.mark.parametrize("balance", [[1, 4], [1, 2, 2]], ids=str)
def test_replicas_are_of_their_forward(
    balance: list[int], change: Callable[[Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a parameter becomes between forward and backward does not reach the copies."""
    pipe = GPipe(tied_across_devices(monkeypatch), balance, chunks=M, checkpoint="always", backend="aten")
    pipe(tokens()).square().mean().backward()
    expected = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
    pipe.zero_grad()
    loss = pipe(tokens()).square().mean()
    change(pipe[0].weight)
    loss.backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(pipe.parameters(), expected, strict=True))


def test_layers_in_python_have_no_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tied_across_devices(monkeypatch)
    with pytest.raises(RuntimeError, match="layers 2 to 4 share a parameter with layers on another device"):
        GPipe(model, [2, 3], chunks=M, backend="eager")(tokens())
