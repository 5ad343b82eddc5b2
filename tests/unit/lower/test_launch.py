"""Lowered launches: their values, their memory, their checks and their description."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast.fuse.launchers import trace_launcher
from gpipe_fast.fuse.rewriter import Rewriter
from gpipe_fast.kernels.launch import Config, launch
from gpipe_fast.lower.launch import is_launch
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.program import ProgramIR, StorageKind
from gpipe_fast.lower.split import StageGraph, split
from gpipe_fast.lower.steps import Allocate, Call, Check, Launch, Ref, Release, values_used
from tests.stages import trace_joint
from tests.unit.fuse.graphs import Function, calls, stage_of
from tests.unit.fuse.triton_kernels import double

aten = torch.ops.aten
ROWS, COLS = 4, 8
SIZE = 4 * ROWS * COLS
BLOCK = Config({"BLOCK": 32})
Launcher = Callable[..., Sequence[Tensor]]


def doubled(x: Tensor) -> tuple[Tensor, ...]:
    y = torch.empty_like(x)
    launch(double, (1,), BLOCK, x, y, 32)
    return (y,)


def never(inputs: list[Tensor], results: list[Tensor]) -> bool:
    raise AssertionError


def forward_of(function: Callable[[Tensor], Any]) -> StageGraph:
    return split(trace_joint([Function(function)], torch.randn(ROWS, COLS)), 0.0).forward


def fused(
    graph: StageGraph, target: Any, launcher: Launcher, inputs: Sequence[Any] = (), check: bool = False
) -> StageGraph:
    """Replaces the only call of an operator by a launcher of the same inputs, or of other calls' results."""
    rewriter = Rewriter(graph)
    (node,) = calls(rewriter.graph, target)
    given = [calls(rewriter.graph, each)[0] for each in inputs] or node.all_input_nodes
    fragment = trace_launcher(launcher, [n.meta["val"] for n in given])
    checked = [*given, *(n for n in node.all_input_nodes if n not in given)]
    rewriter.replace(given, [node], fragment, never if check else None, checked)
    return rewriter.finish()


def launches(program: ProgramIR) -> list[Launch]:
    return [step for step in program.steps if isinstance(step, Launch)]


def live(program: ProgramIR) -> dict[int, tuple[int, int]]:
    """Returns the first and last step that uses each value's memory."""
    found: dict[int, tuple[int, int]] = {}
    for position, step in enumerate(program.steps):
        if isinstance(step, Release):
            continue
        for value in values_used(step):
            own = program.values[value]
            base = own.index if own.storage is StorageKind.VIEW else value
            found[base] = found.get(base, (position, position))[0], position
    return found


def clashes(program: ProgramIR) -> list[tuple[str, str]]:
    """Returns the pairs of arena values that share memory while both are needed."""
    arena = {i: v for i, v in enumerate(program.values) if v.storage is StorageKind.ARENA}
    spans = {i: (v.index, v.index + v.dtype.itemsize * torch.Size(v.sizes).numel()) for i, v in arena.items()}
    used = live(program)
    return [
        (arena[a].name, arena[b].name)
        for a, b in combinations(arena.keys() & used.keys(), 2)
        if spans[a][0] < spans[b][1] and spans[b][0] < spans[a][1]
        and not is_over(program, used[a], used[b]) and not is_over(program, used[b], used[a])
    ]  # fmt: skip


def is_over(program: ProgramIR, first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Returns whether the first use of memory ends before the second; an operator may work in place."""
    in_place = first[1] == second[0] and isinstance(program.steps[first[1]], Call)
    return first[1] < second[0] or in_place


def test_a_launch_reads_and_writes_values() -> None:
    """A kernel may read an input after it has written a result; a pointwise operator may not."""
    graph = forward_of(lambda x: x.exp().sin().tanh())
    program = lower(fused(graph, aten.sin.default, doubled))
    (step,) = launches(program)
    x, y, size = step.arguments
    assert isinstance(x, Ref)
    assert isinstance(y, Ref)
    assert (size, step.layer) == (32, 0)
    assert step.written() == (y.value,)
    assert [type(s) for s in program.steps] == [Call, Launch, Allocate, Call]
    assert clashes(program) == []
    assert (lower(graph).arena_bytes, program.arena_bytes) == (SIZE, 2 * SIZE)


def test_a_returned_view_of_a_result_is_fresh() -> None:
    program = lower(fused(forward_of(lambda x: x.exp().sin().t()), aten.sin.default, doubled))
    (written,) = launches(program)[0].written()
    assert program.values[written].storage is StorageKind.FRESH
    assert program.values[program.results[0]].index == written
    assert program.values[program.results[0]].storage is StorageKind.VIEW


def test_a_check_follows_its_launch_and_keeps_its_inputs() -> None:
    """The kernel does not read what the check compares it with: exp, whose last other use is far before."""

    def function(x: Tensor) -> Tensor:
        h = x.exp()
        return h.sin().cosh().tanh()

    def launcher(h: Tensor, unread: Tensor) -> tuple[Tensor, ...]:
        return doubled(h)

    inputs = (aten.sin.default, aten.exp.default)
    steps = {}
    for check in (False, True):
        graph = fused(forward_of(function), aten.cosh.default, launcher, inputs, check)
        steps[check] = lower(graph)
        assert clashes(steps[check]) == []
    program = steps[True]
    at = [position for position, step in enumerate(program.steps) if isinstance(step, Check)]
    assert at == [position + 1 for position, step in enumerate(program.steps) if isinstance(step, Launch)]
    check_step = program.steps[at[0]]
    assert isinstance(check_step, Check)
    assert check_step.function is never
    assert [program.values[v].name for v in check_step.inputs] == ["sin", "exp"]
    assert check_step.results == launches(program)[0].written()
    assert not any(isinstance(step, Check) for step in steps[False].steps)
    assert program.arena_bytes == steps[False].arena_bytes + SIZE


def test_a_check_keeps_the_results_of_earlier_launches() -> None:
    def launcher(h: Tensor) -> tuple[Tensor, ...]:
        (first,) = doubled(h)
        (second,) = doubled(first.cosh().sinh())
        return (second,)

    graph = fused(forward_of(lambda x: x.exp().sin().tanh()), aten.sin.default, launcher, check=True)
    program = lower(graph)
    first, second = launches(program)
    (check,) = (step for step in program.steps if isinstance(step, Check))
    assert check.results == (*first.written(), *second.written())
    assert clashes(program) == []
    (ends,) = {live(program)[v][1] for v in first.written()}
    assert program.steps[ends] is check


def test_values_that_operators_allocate_are_released_after_the_check() -> None:
    def function(x: Tensor) -> Tensor:
        norm: Tensor = aten.native_layer_norm(x, [COLS], None, None, 0.5)[0]
        return norm.sin().tanh()

    graph = forward_of(function)
    program = lower(fused(graph, aten.sin.default, doubled, check=True))
    kinds = [type(step) for step in program.steps]
    assert kinds.index(Launch) < kinds.index(Check) < kinds.index(Release, kinds.index(Check))
    released = [step.value for step in program.steps[kinds.index(Check) :] if isinstance(step, Release)]
    assert [v for v in launches(program)[0].arguments if isinstance(v, Ref) and v.value in released]


@pytest.mark.parametrize("is_read_again", [False, True])
def test_a_kernel_changes_a_value_itself_if_nothing_else_reads_it(is_read_again: bool) -> None:
    """Otherwise it changes a copy."""

    def function(x: Tensor) -> Tensor:
        changed = x.exp()
        y = changed.sin().tanh()
        return y * changed.cosh() if is_read_again else y

    graph = fused(forward_of(function), aten.sin.default, doubled)
    (launched,) = (node for node in graph.module.graph.nodes if is_launch(node))
    (x,) = graph.module.graph.find_nodes(op="placeholder")
    step, (changed, _, size), *others = launched.args
    launched.args = (step, (x, changed, size), *others)
    program = lower(graph)
    (written,) = launches(program)[0].written()
    assert (program.values[written].name == "exp") is not is_read_again
    assert clashes(program) == []


LAYERS = [nn.Linear(COLS, COLS), nn.Tanh(), nn.Linear(COLS, COLS)]


@pytest.mark.parametrize(
    ("target", "launcher"),
    [(aten.tanh.default, doubled), (aten.tanh_backward.default, lambda g, y: doubled(g))],
)
def test_the_parts_of_a_backward_are_kept(target: Any, launcher: Launcher) -> None:
    """A launch of the recompute is early, one of a gradient is not; gradients of parameters come last."""
    graph = stage_of(LAYERS, torch.randn(ROWS, COLS))[2]
    plain, program = lower(graph), lower(fused(graph, target, launcher, check=True))
    early, computed = program.parts
    (position,) = (i for i, step in enumerate(program.steps) if isinstance(step, Launch))
    recomputes = target is aten.tanh.default
    assert (position < early) == recomputes
    assert position < computed
    assert isinstance(program.steps[position + 1], Check)
    assert position + 1 != early, "the check belongs to its launch"
    assert early == plain.parts[0] + recomputes
    assert len(program.steps) - computed == len(plain.steps) - plain.parts[1]


def test_kernels_read_what_they_were_traced_with() -> None:
    """A program copies an input or an operator's result to the traced strides if it has a view."""
    # It has no faithful out variant, so it returns its results.
    norm = nn.LayerNorm(COLS, elementwise_affine=False)

    def views_of_arguments(function: Callable[[Tensor], Tensor]) -> list[StorageKind]:
        program = lower(fused(forward_of(function), aten.sin.default, doubled))
        viewed = {v.index for v in program.values if v.storage is StorageKind.VIEW}
        (read, _, _) = launches(program)[0].arguments
        assert isinstance(read, Ref)
        return [program.values[read.value].storage] * (read.value in viewed)

    assert views_of_arguments(lambda x: x.sin()) == [StorageKind.INPUT]
    assert views_of_arguments(lambda x: norm(x).sin()) == [StorageKind.RESULT]
    assert views_of_arguments(lambda x: x.exp().sin()) == [], "the program writes this one itself"
