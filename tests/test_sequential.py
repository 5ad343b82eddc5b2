"""The sequential executor: order of accumulation, what is kept, what a failure leaves behind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast._extension import MiniBatch, StageRun
from gpipe_fast.compile import Compiler, Refusal, Spec, Stage
from gpipe_fast.trace import buffers_of, parameters_of

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
WIDTH, BATCH, M = 8, 32, 4


def stages_of(layers: Sequence[nn.Module], balance: Sequence[int]) -> list[Stage]:
    starts = [sum(balance[:i]) for i in range(len(balance))]
    return [Stage(layers[a : a + n], a, CPU) for a, n in zip(starts, balance, strict=True)]


def minibatch_of(
    layers: Sequence[nn.Module],
    balance: Sequence[int],
    microbatches: Sequence[Tensor],
    budgets: Sequence[float],
) -> MiniBatch:
    """A mini-batch of equal micro-batches; each saves its own share of activations."""
    stages = stages_of(layers, balance)
    compiled = Compiler().compile(stages, [(Spec.of(microbatches[0], microbatches[0].requires_grad),)])
    assert not isinstance(compiled, Refusal), compiled
    (pipeline,) = compiled
    runs = [
        StageRun(
            parameters_of(stage.layers),
            buffers_of(stage.layers),
            stage.first_layer,
            [c.run_pass(b) for b in budgets],
        )
        for stage, c in zip(stages, pipeline, strict=True)
    ]
    return MiniBatch(runs, 0)


def mlp() -> list[nn.Module]:
    torch.manual_seed(0)
    return [m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]


def data() -> tuple[Tensor, ...]:
    return torch.randn(BATCH, WIDTH, requires_grad=True).chunk(M)


def tangents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH // M, WIDTH, generator=generator) for _ in range(M)]


def flat(groups: Sequence[Sequence[Tensor | None]]) -> list[Tensor]:
    tensors = [t for group in groups for t in group]
    assert all(t is not None for t in tensors)
    return tensors  # type: ignore[return-value]


def test_the_last_micro_batch_is_added_first() -> None:
    layers, microbatches = mlp(), data()
    model = nn.Sequential(*layers)
    minibatch = minibatch_of(layers, [4, 4], microbatches, [0.0] * M)
    outputs = flat(minibatch.forward([[m] for m in microbatches]))
    _, gradients = minibatch.backward([[t] for t in tangents()], False)
    each = [
        torch.autograd.grad(model(m), list(model.parameters()), t)
        for m, t in zip(microbatches, tangents(), strict=True)
    ]
    for output, microbatch in zip(outputs, microbatches, strict=True):
        assert torch.equal(output, model(microbatch))
    forwards = []
    for index, ours in enumerate(flat(gradients)):
        last_first = ((each[3][index] + each[2][index]) + each[1][index]) + each[0][index]
        assert torch.equal(ours, last_first)
        forwards.append(((each[0][index] + each[1][index]) + each[2][index]) + each[3][index])
    assert not all(torch.equal(o, f) for o, f in zip(flat(gradients), forwards, strict=True))


@pytest.mark.parametrize("budgets", [[0.0] * M, [1.0] * M, [0.0, 1.0, 0.5, 0.0]], ids=str)
@pytest.mark.parametrize("balance", [[8], [4, 4], [1, 2, 5]], ids=str)
def test_balance_and_budgets_change_no_bit(balance: list[int], budgets: list[float]) -> None:
    layers, microbatches = mlp(), data()
    results = []
    for cut, share in (([8], [1.0] * M), (balance, budgets)):
        minibatch = minibatch_of(layers, cut, microbatches, share)
        outputs = minibatch.forward([[m] for m in microbatches])
        inputs, parameters = minibatch.backward([[t] for t in tangents()], False)
        results.append(flat(outputs) + flat(inputs) + flat(parameters))
    for ours, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("budget", [0.0, 1.0])
def test_kept_tensors_go_with_the_backward(budget: float) -> None:
    layers, microbatches = mlp(), data()
    minibatch = minibatch_of(layers, [4, 4], microbatches, [budget] * M)
    minibatch.forward([[m] for m in microbatches])
    before = minibatch.kept_bytes
    first = minibatch.backward([[t] for t in tangents()], True)
    assert minibatch.kept_bytes == before
    second = minibatch.backward([[t] for t in tangents()], False)
    for a, b in zip(flat(first[0]) + flat(first[1]), flat(second[0]) + flat(second[1]), strict=True):
        assert torch.equal(a, b)
    assert minibatch.kept_bytes == 0
    with pytest.raises(RuntimeError, match="backward needs the gradients of 0 micro-batches, once, got 4"):
        minibatch.backward([[t] for t in tangents()], False)


def test_full_recompute_keeps_the_boundaries_alone() -> None:
    """Contract 4: for K stages of an MLP, the mini-batch once and K - 1 boundary activations of its size."""
    layers, microbatches = mlp(), data()
    for balance in ([8], [4, 4], [2, 2, 2, 2]):
        minibatch = minibatch_of(layers, balance, microbatches, [0.0] * M)
        minibatch.forward([[m] for m in microbatches])
        assert minibatch.kept_bytes == len(balance) * BATCH * WIDTH * 4


def test_kept_bytes_grow_with_what_is_saved() -> None:
    layers, microbatches = mlp(), data()
    kept = []
    for budgets in ([0.0] * M, [0.0] * (M - 1) + [1.0], [1.0] * M):
        minibatch = minibatch_of(layers, [4, 4], microbatches, budgets)
        minibatch.forward([[m] for m in microbatches])
        kept.append(minibatch.kept_bytes)
    assert kept[0] < kept[1] < kept[2]


def test_inference_keeps_nothing() -> None:
    layers, microbatches = mlp(), data()
    with torch.no_grad():
        minibatch = minibatch_of(layers, [4, 4], [m.detach() for m in microbatches], [0.0] * M)
    minibatch.forward([[m] for m in microbatches])
    assert minibatch.kept_bytes == 0


class Count(nn.Module):
    """Counts its calls, and keeps a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.mean.mul_(0.5).add_(x.float().mean())
        return x


def test_buffers_are_written_only_if_all_stages_succeed() -> None:
    layers = [Count(), nn.Embedding(4, WIDTH)]
    good = [torch.tensor([0, 1]), torch.tensor([2, 3])]
    minibatch = minibatch_of(layers, [1, 1], good, [0.0, 0.0])
    with pytest.raises(IndexError, match="index out of range"):
        minibatch.forward([[good[0]], [torch.tensor([0, 4])]])
    assert layers[0].calls == 0
    assert layers[0].mean == 0
    minibatch.forward([[m] for m in good])
    assert layers[0].calls == 2
    assert layers[0].mean == 0.5 * 0.5 + 2.5


class Scale(nn.Module):
    """Scales by a running value that it updates first: a buffer both read and written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(0.5).add_(x.detach().mean(0))
        return x * self.scale.clone()


def test_recompute_reads_the_buffers_that_the_forward_read() -> None:
    """Writing the final buffers must not change what the first micro-batch recomputes from."""
    x = torch.linspace(-1, 1, BATCH * WIDTH).view(BATCH, WIDTH).requires_grad_()
    linear, microbatches, gradients = nn.Linear(WIDTH, WIDTH), x.chunk(M), []
    for budget in (1.0, 0.0):
        layers = [linear, Scale()]
        minibatch = minibatch_of(layers, [2], microbatches, [budget] * M)
        minibatch.forward([[m] for m in microbatches])
        inputs, parameters = minibatch.backward([[t] for t in tangents()], False)
        gradients.append(flat(inputs) + flat(parameters))
    for saved, recomputed in zip(*gradients, strict=True):
        assert torch.equal(recomputed, saved)


def test_refuses_another_number_of_micro_batches() -> None:
    layers, microbatches = mlp(), data()
    minibatch = minibatch_of(layers, [8], microbatches, [0.0] * M)
    with pytest.raises(RuntimeError, match="stage 0 has programs for 4 micro-batches, got 3"):
        minibatch.forward([[m] for m in microbatches[:3]])
    minibatch.forward([[m] for m in microbatches])
    with pytest.raises(RuntimeError, match="gradients of 4 micro-batches, once, got 3"):
        minibatch.backward([[t] for t in tangents()[:3]], False)
