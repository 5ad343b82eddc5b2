"""Placement of a program's values in memory, which is reused only after its last read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.program import ProgramIR, StorageKind
from gpipe_fast.lower.split import split
from gpipe_fast.lower.steps import Allocate, Call, Release, values_used, values_written
from gpipe_fast.trace.joint_graph import GraphRole
from tests.stages import Runner, input_values, run_graph, trace_joint, unequal
from tests.unit.fuse.graphs import Function

pytestmark = pytest.mark.usefixtures("one_thread")


def transposed(x: Tensor) -> Tensor:
    h = x.tanh()
    return (h * h.t()).exp()


def shifted(x: Tensor) -> Tensor:
    h = x.tanh().flatten()
    return (h[:32] * h[32:] + h[16:48]).exp()


def read_later(x: Tensor) -> Tensor:
    h = x.tanh()
    return (h.exp() + 1).sin() * h


def broadcast(x: Tensor) -> Tensor:
    h = x.tanh()
    return (h + h[0]).exp()


@pytest.mark.parametrize("function", [transposed, shifted, read_later, broadcast])
def test_memory_is_not_overwritten_before_its_last_read(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    layers, x = [Function(function)], torch.randn(8, 8)
    joint = trace_joint(layers, x)
    graph = split(joint, 0.0).forward
    values = input_values(layers, joint, x)
    assert unequal(Runner(graph, layers)(values), run_graph(graph, values)) == []


def test_values_that_operators_allocate_are_released_after_their_last_use() -> None:
    """Layer norm returns new tensors, each of which is released after its last read."""
    layers = [m for _ in range(3) for m in (nn.Linear(8, 8), nn.LayerNorm(8))]
    program = lower(split(trace_joint(layers, torch.randn(4, 8)), 0.0).forward)
    made = {i for i, v in enumerate(program.values) if v.storage is StorageKind.RESULT}
    released = [step.value for step in program.steps if isinstance(step, Release)]
    assert len(released) == len(set(released))
    assert made - set(released) == {program.results[0]}


def test_outputs_hold_no_more_memory_than_their_own_size() -> None:
    layers, x = [nn.Linear(8, 8), Function(lambda h: h[:, :2].contiguous())], torch.randn(64, 8)
    joint = trace_joint(layers, x)
    (output,) = Runner(split(joint, 0.0).forward, layers)(input_values(layers, joint, x)).values()
    assert output.untyped_storage().nbytes() == output.nbytes


class ReturnsOwnTensors(nn.Module):
    """Returns its own tensors, as position embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("scale", torch.ones(4))
        self.plain = torch.ones(3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x + 1, self.weight.t(), self.scale, self.plain


def test_outputs_do_not_alias_the_modules_tensors() -> None:
    """An optimizer step must not change results that were returned before it."""
    layer, x = ReturnsOwnTensors(), torch.randn(4, 4)
    joint = trace_joint([layer], x)
    values = input_values([layer], joint, x)
    results = Runner(split(joint, 0.0).forward, [layer])(values)
    kept = {port: value.clone() for port, value in results.items()}
    with torch.no_grad():
        for owned in (layer.weight, layer.scale, layer.plain, *values.values()):
            owned.zero_()
    assert unequal(results, kept) == []


MODELS: dict[str, list[nn.Module]] = {
    "mlp": [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)],
    "normalised": [nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)],
    "without parameters": [nn.Tanh(), nn.Softmax(1)],
}


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_each_part_of_a_backward_waits_only_for_what_it_reads(name: str, fraction: float) -> None:
    layers, x = MODELS[name], torch.randn(4, 8, requires_grad=True)
    graph = split(trace_joint(layers, x), fraction).backward
    assert graph is not None
    program = lower(graph)
    early, made = program.parts
    inputs = [i for i, value in enumerate(program.values) if value.storage is StorageKind.INPUT]
    dependent = {i for i, p in zip(inputs, program.inputs, strict=True) if p.role is GraphRole.TANGENT}
    results, written = bases(program, program.results), [early - 1]
    for position, step in enumerate(program.steps):
        used = bases(program, values_used(step))
        depends = not dependent.isdisjoint(used)
        dependent |= used if depends else set()
        assert depends or position < early or isinstance(step, (Allocate, Release))
        assert not depends or position >= early
        accumulates = any(program.values[v].storage is StorageKind.ACCUMULATOR for v in used)
        # One operator computes all gradients of a layer norm.
        assert not accumulates or position >= made or name == "normalised"
        if isinstance(step, Call) and results & bases(program, values_written(step)):
            written.append(position)
    assert max(written) + 1 == made
    rest = [step for step in program.steps[made:] if not isinstance(step, Release)]
    assert bool(rest) == any(True for layer in layers for _ in layer.parameters())


def bases(program: ProgramIR, values: Sequence[int]) -> set[int]:
    """Returns the values whose memory these are in."""
    own = program.values
    return {own[v].index if own[v].storage is StorageKind.VIEW else v for v in values}
