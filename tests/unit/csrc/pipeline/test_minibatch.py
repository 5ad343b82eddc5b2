"""Mini-batches: the order of accumulation, memory kept for the backward, buffers, and failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast._extension import Pipeline, PythonWorkers, kept_bytes
from gpipe_fast.layers.structure import BatchDims
from gpipe_fast.runtime.compile import CompilationFailure, Compiler
from gpipe_fast.runtime.compiled import CompiledStage
from gpipe_fast.runtime.plan import PlannedCall, SegmentFinder, make_plan
from gpipe_fast.runtime.stage import BoundarySpec, Stage, TensorSpec
from gpipe_fast.trace.joint_graph import buffers_of, parameters_of

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
WIDTH, BATCH, M = 8, 32, 4


class NoSearch(SegmentFinder):
    """Fails on every search, for plans whose segments are all known."""

    def find(self, *arguments: Any) -> Any:
        raise AssertionError("a segment was searched for although all are known")

    fallback = find


def plan_of(known: Sequence[Sequence[CompiledStage]], fractions: Sequence[float]) -> PlannedCall:
    stages = [stage.stage for stage in known[0]]
    finders = [NoSearch() for _ in stages]
    microbatches = [known[0][0].inputs] * len(fractions)
    return make_plan(stages, finders, microbatches, [fractions] * len(stages), 1, BatchDims((0,)), known)


class Pipe:
    """A pipeline of equal micro-batches, each with its own saved fraction."""

    def __init__(
        self, layers: Sequence[nn.Module], balance: Sequence[int], x: Tensor, fractions: Sequence[float]
    ) -> None:
        starts = [sum(balance[:i]) for i in range(len(balance))]
        stages = [Stage(layers[a : a + n], a, CPU) for a, n in zip(starts, balance, strict=True)]
        spec = TensorSpec.of(x.chunk(M)[0], x.requires_grad and torch.is_grad_enabled())
        compiled = Compiler().compile(stages, [BoundarySpec((spec,))])
        assert not isinstance(compiled, CompilationFailure), compiled
        self.layers, self.pipeline = layers, Pipeline(len(balance), PythonWorkers())
        self.plan = plan_of(compiled * M, fractions)

    def __call__(self, x: Tensor) -> Tensor:
        (output,), _ = self.pipeline.forward(
            self.plan.native, [x], parameters_of(self.layers), buffers_of(self.layers), 0
        )
        return output


def mlp() -> list[nn.Module]:
    torch.manual_seed(0)
    return [m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]


def data() -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2), requires_grad=True)


def tangent() -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(layers: Sequence[nn.Module], x: Tensor, output: Tensor, retain: bool = False) -> list[Tensor]:
    wanted = [x, *parameters_of(layers)]
    return list(torch.autograd.grad(output, wanted, tangent(), retain_graph=retain))


def test_gradients_are_accumulated_from_the_last_micro_batch_to_the_first() -> None:
    layers, x = mlp(), data()
    model = nn.Sequential(*layers)
    output = Pipe(layers, [4, 4], x, [0.0] * M)(x)
    each = [
        torch.autograd.grad(model(m), list(model.parameters()), t)
        for m, t in zip(x.chunk(M), tangent().chunk(M), strict=True)
    ]
    assert torch.equal(output, torch.cat([model(m) for m in x.chunk(M)]))
    found, forwards = gradients(layers, x, output)[1:], []
    for index, ours in enumerate(found):
        last_first = ((each[3][index] + each[2][index]) + each[1][index]) + each[0][index]
        assert torch.equal(ours, last_first)
        forwards.append(((each[0][index] + each[1][index]) + each[2][index]) + each[3][index])
    assert not all(torch.equal(o, f) for o, f in zip(found, forwards, strict=True))


@pytest.mark.parametrize("fractions", [[0.0] * M, [1.0] * M, [0.0, 1.0, 0.5, 0.0]], ids=str)
@pytest.mark.parametrize("balance", [[8], [4, 4], [1, 2, 5]], ids=str)
def test_balance_and_saved_fractions_change_no_bit(balance: list[int], fractions: list[float]) -> None:
    layers, x, results = mlp(), data(), []
    for layers_per_stage, saved in (([8], [1.0] * M), (balance, fractions)):
        output = Pipe(layers, layers_per_stage, x, saved)(x)
        results.append([output, *gradients(layers, x, output)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_kept_tensors_are_freed_by_a_backward_that_does_not_retain_the_graph(fraction: float) -> None:
    layers, x = mlp(), data()
    output = Pipe(layers, [4, 4], x, [fraction] * M)(x)
    before = kept_bytes(output)
    first = gradients(layers, x, output, retain=True)
    assert kept_bytes(output) == before
    second = gradients(layers, x, output)
    assert all(map(torch.equal, first, second))
    assert kept_bytes(output) == 0


def test_full_recompute_keeps_only_boundary_activations() -> None:
    """Contract 4: K stages of an MLP keep the mini-batch and K - 1 boundary activations of its size."""
    layers, x = mlp(), data()
    for balance in ([8], [4, 4], [2, 2, 2, 2]):
        assert kept_bytes(Pipe(layers, balance, x, [0.0] * M)(x)) == len(balance) * BATCH * WIDTH * 4


def test_kept_bytes_grow_with_the_saved_fractions() -> None:
    layers, x = mlp(), data()
    policies = ([0.0] * M, [0.0] * (M - 1) + [1.0], [1.0] * M)
    always, except_last, never = (kept_bytes(Pipe(layers, [4, 4], x, fractions)(x)) for fractions in policies)
    assert always < except_last < never


def test_kept_bytes_are_zero_without_a_pipelines_graph() -> None:
    layers, x = mlp(), data()
    assert kept_bytes(nn.Sequential(*layers)(x)) == 0
    with torch.no_grad():
        assert kept_bytes(Pipe(layers, [4, 4], x, [0.0] * M)(x)) == 0


def test_inference_bounds_the_slots_of_a_schedule() -> None:
    layers, x = mlp(), data()
    assert Pipe(layers, [4, 4], x, [0.0] * M).plan.schedule.slots == M
    many = torch.randn(2 * BATCH, WIDTH)
    with torch.no_grad():
        compiled = Compiler().compile(
            [Stage(layers, 0, CPU)], [BoundarySpec((TensorSpec.of(many[:4], False),))]
        )
        assert not isinstance(compiled, CompilationFailure), compiled
        assert plan_of(compiled * 16, [1.0] * 16).schedule.slots < 16


class Count(nn.Module):
    """Counts its calls and keeps a running mean of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.mean.mul_(0.5).add_(x.float().mean())
        return x


def test_buffers_are_written_only_if_all_stages_succeed() -> None:
    layers = [Count(), nn.Embedding(8, WIDTH)]
    good = torch.arange(8)
    pipe = Pipe(layers, [1, 1], good, [0.0] * M)
    with pytest.raises(IndexError, match=r"index out of range.*in action 1F3"):
        pipe(torch.arange(8) + torch.tensor([0] * 7 + [1]))
    assert layers[0].calls == 0
    assert layers[0].mean == 0
    pipe(good)
    assert layers[0].calls == M
    assert layers[0].mean == (((0.5 * 0.5 + 2.5) * 0.5 + 4.5) * 0.5) + 6.5


def test_written_buffers_invalidate_earlier_graphs_that_saved_them() -> None:
    """A graph that saved the old statistics must not be differentiated with the new ones."""
    norm, x = nn.BatchNorm1d(WIDTH), data()
    earlier = norm.eval()(x).sum()
    norm.train()
    Pipe([norm, nn.Tanh()], [1, 1], x, [0.0] * M)(x)
    assert norm.num_batches_tracked == M
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        earlier.backward()


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_an_in_place_change_of_a_buffer_before_the_backward_raises(fraction: float) -> None:
    """The backward reads the statistics, as in eager mode."""
    norm, x = nn.BatchNorm1d(WIDTH).eval(), data()
    for forward in (nn.Sequential(norm, nn.Tanh()), Pipe([norm, nn.Tanh()], [1, 1], x, [fraction] * M)):
        loss = forward(x).sum()
        norm.running_var.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_new_data_of_a_buffer_before_the_backward_raises() -> None:
    """Eager autograd would use the old data; a recompute can no longer read it."""
    norm, x = nn.BatchNorm1d(WIDTH).eval(), data()
    loss = Pipe([norm, nn.Tanh()], [1, 1], x, [0.0] * M)(x).sum()
    norm.running_var.data = torch.ones(WIDTH) * 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_stages_may_share_a_buffer_only_if_neither_writes_it() -> None:
    """Both stages run concurrently, so neither would read the values of the plain loop's order."""
    first, second = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
    second.running_mean = first.running_mean
    with pytest.raises(ValueError, match=r"stage 0 writes a buffer of shape \[8\] that stage 1 uses, too"):
        Pipe([first, second], [1, 1], data(), [0.0] * M)
    x = data()
    expected = nn.Sequential(first.eval(), second.eval())(x)
    assert torch.equal(Pipe([first, second], [1, 1], x, [0.0] * M)(x), expected)


class Scale(nn.Module):
    """Scales by a running value that it updates first: the buffer is both read and written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(0.5).add_(x.detach().mean(0))
        return x * self.scale.clone()


def test_a_recompute_reads_the_buffer_values_that_the_forward_read() -> None:
    """Writing the final buffers must not change the values from which the first micro-batch recomputes."""
    x, linear, found = data(), nn.Linear(WIDTH, WIDTH), []
    for fraction in (1.0, 0.0):
        layers = [linear, Scale()]
        output = Pipe(layers, [2], x, [fraction] * M)(x)
        found.append(gradients(layers, x, output))
    assert all(map(torch.equal, *found))
