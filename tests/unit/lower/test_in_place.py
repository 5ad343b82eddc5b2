"""Products that add to a matrix: in its memory, if nothing else reads it, also for a returned sum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.program import ProgramIR, StorageKind
from gpipe_fast.lower.split import StageGraph, split
from gpipe_fast.lower.steps import Call, Ref
from tests.stages import Runner, input_values, run_graph, trace_joint, unequal
from tests.unit.fuse.graphs import Function

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten
SIZE = 8


def forward_of(function: Callable[[Tensor], Tensor], x: Tensor) -> StageGraph:
    return split(trace_joint([Function(function)], x), 0.0).forward


def products(program: ProgramIR) -> list[tuple[StorageKind, bool]]:
    """Returns the storage of each sum with a product, and whether it is computed in place."""
    found = []
    for step in program.steps:
        if isinstance(step, Call) and step.op is aten.addmm.out:
            first, out = step.arguments[0], step.arguments[-1]
            assert isinstance(out, Ref)
            found.append((program.values[out.value].storage, first == out))
    return found


def check(function: Callable[[Tensor], Tensor], *expected: tuple[StorageKind, bool]) -> None:
    x = torch.randn(SIZE, SIZE)
    graph = forward_of(function, x)
    assert products(lower(graph)) == list(expected)
    values = input_values([], trace_joint([Function(function)], x), x)
    given = {port: values[port] for port, _ in graph.inputs if port in values}
    assert unequal(Runner(graph, [])(given), run_graph(graph, given)) == []


ARENA, FRESH = StorageKind.ARENA, StorageKind.FRESH


def test_a_returned_sum_is_computed_in_memory_of_its_own() -> None:
    check(lambda x: torch.addmm(torch.addmm(x.exp(), x, x), x, x), (FRESH, True), (FRESH, True))


def test_a_sum_in_the_arena_stays_there() -> None:
    check(lambda x: torch.addmm(x.exp(), x, x).sin(), (ARENA, True))


def test_a_matrix_that_others_read_is_copied() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.exp()
        return torch.addmm(y, x, x).sin() * y

    check(function, (ARENA, False))
    check(lambda x: torch.addmm(x, x, x).sin(), (ARENA, False))


def test_a_scaled_or_expanded_matrix_is_not_overwritten() -> None:
    check(lambda x: torch.addmm(x.exp(), x, x, beta=2).sin(), (ARENA, False))
    check(lambda x: torch.addmm(x.exp()[0], x, x).sin(), (ARENA, False))
