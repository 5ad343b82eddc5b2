"""Tied parameters: the gradients of all uses are summed, within a stage and across stages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gpipe_fast.runtime.plan
from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.runtime.stage import Stage
from tests.internals import inject_delays
from tests.reference import error, loop_step, pipeline_step, unequal
from tests.untraceable import FunctionLayer

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*micro-batches on:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*runs in Python:UserWarning"),
]

VOCABULARY, WIDTH, M = 11, 8, 4


def language_model() -> nn.Sequential:
    """Returns a language model whose head shares the embedding's weight."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), head)


def tokens(batch: int = 8) -> Tensor:
    return torch.randint(VOCABULARY, (batch, 5), generator=torch.Generator().manual_seed(1))


def check(model: nn.Sequential, pipe: GPipe, tied: set[str]) -> None:
    """Asserts equality with the plain loop; gradients of `tied` parameters may be summed in another order."""
    expected, ours = loop_step(model, tokens(), M), pipeline_step(pipe, tokens())
    assert set(unequal(ours, expected)) <= {f"gradient of {name}" for name in tied}
    model_in_float64 = model.double()
    truth = loop_step(model_in_float64, tokens(), M)
    model.float()
    our_errors, eager_errors = error(ours, truth), error(expected, truth)
    assert all(our_errors[name] <= 2 * eager_errors[name] for name in our_errors)


@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize("balance", [[2, 3], [1, 2, 2], [1] * 5], ids=str)
def test_parameters_tied_across_stages_equal_the_plain_loop(balance: list[int], backend: str) -> None:
    model = language_model()
    pipe = GPipe(model, balance, chunks=M, backend=backend)
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
    for mode in CHECKPOINT_MODES:
        pipe.checkpoint = mode
        check(model, pipe, {"0.weight"})


@pytest.mark.parametrize("balance", [[5], [5, 1]], ids=str)
def test_parameters_tied_within_a_stage_equal_the_plain_loop_bit_for_bit(balance: list[int]) -> None:
    model = language_model()
    if len(balance) > 1:
        model.append(nn.Linear(VOCABULARY, 3))
    pipe = GPipe(model, balance, chunks=M, backend="aten")
    for mode in CHECKPOINT_MODES:
        pipe.checkpoint = mode
        assert unequal(pipeline_step(pipe, tokens()), loop_step(model, tokens(), M)) == []


def test_a_step_with_tied_parameters_is_deterministic() -> None:
    """The order of the sum over stages does not depend on timing."""
    pipe = GPipe(language_model(), [1, 2, 2], chunks=M, backend="aten")
    first = pipeline_step(pipe, tokens())
    for seed in range(5):
        inject_delays(pipe, seed + 1, max_delay_us=300)
        assert unequal(pipeline_step(pipe, tokens()), first) == []


def test_a_use_without_a_gradient_equals_the_plain_loop() -> None:
    """The embedding's use gets no gradient, because its output is detached in the second stage."""
    model = language_model()
    model[1] = FunctionLayer(lambda f, x: f(x.detach()), nn.Linear(WIDTH, WIDTH))
    pipe = GPipe(model, [1, 2, 2], chunks=M)
    check(model, pipe, set())


def test_a_hook_sees_the_complete_gradient_of_a_tied_parameter_once() -> None:
    """This also holds if both uses run in Python, in stages that run concurrently."""
    for backend in ("aten", "eager"):
        model, hook_calls = language_model(), []
        pipe = GPipe(model, [1, 2, 2], chunks=M, backend=backend)
        handle = model[0].weight.register_hook(lambda g, hook_calls=hook_calls: hook_calls.append(g.clone()))
        pipe(tokens()).square().mean().backward()
        handle.remove()
        assert len(hook_calls) == 1
        assert torch.equal(hook_calls[0], model[0].weight.grad)


def tied_across_devices(monkeypatch: pytest.MonkeyPatch) -> nn.Sequential:
    """Returns a model whose head pretends to be on another device than the embedding.

    All tensors are on the CPU, but all stages except the first compute with a replica of the tied parameter.
    """
    model = language_model()
    shared = model[0].weight

    def pretend_elsewhere(tensor: Tensor, stage: Stage) -> bool:
        return tensor is shared and stage.first_layer > 0

    monkeypatch.setattr(gpipe_fast.runtime.plan, "is_replica", pretend_elsewhere)
    return model


@pytest.mark.parametrize("balance", [[2, 3], [1, 2, 2]], ids=str)
def test_replicas_on_other_devices_equal_the_plain_loop(
    balance: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are accumulated in the one parameter; every kind of update reaches the replicas."""
    model = tied_across_devices(monkeypatch)
    pipe = GPipe(model, balance, chunks=M, backend="aten")
    for mode in CHECKPOINT_MODES:
        pipe.checkpoint = mode
        check(model, pipe, {"0.weight"})
        with torch.no_grad():
            model[0].weight.mul_(1.5)
        check(model, pipe, {"0.weight"})
        model[0].weight.data.mul_(0.5)  # does not increment the version counter
        check(model, pipe, {"0.weight"})
        model[0].weight.data = torch.randn(VOCABULARY, WIDTH)
        check(model, pipe, {"0.weight"})


def replace_data(parameter: Tensor) -> None:
    parameter.data = torch.zeros(VOCABULARY, WIDTH)


def write_in_place(parameter: Tensor) -> None:
    parameter.data.zero_()


@pytest.mark.parametrize("change", [replace_data, write_in_place])
@pytest.mark.parametrize("balance", [[1, 4], [1, 2, 2]], ids=str)
def test_a_backward_uses_the_replicas_of_its_forward(
    balance: list[int], change: Callable[[Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of the parameter between forward and backward does not reach the replicas."""
    pipe = GPipe(tied_across_devices(monkeypatch), balance, chunks=M, checkpoint="always", backend="aten")
    pipe(tokens()).square().mean().backward()
    expected = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
    pipe.zero_grad()
    loss = pipe(tokens()).square().mean()
    change(pipe[0].weight)
    loss.backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(pipe.parameters(), expected, strict=True))


def test_layers_in_python_tied_across_devices_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tied_across_devices(monkeypatch)
    with pytest.raises(RuntimeError, match="layers 2 to 4 share a parameter with layers on another device"):
        GPipe(model, [2, 3], chunks=M, backend="eager")(tokens())
