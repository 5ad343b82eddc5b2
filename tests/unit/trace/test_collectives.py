"""Collectives in graphs and programs, in a group of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpipe_fast._extension import Arena, Layout, Program, Value
from gpipe_fast.lower.accumulation import AccumulationPolicy
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.program_template import lower_graphs
from gpipe_fast.lower.split import split
from gpipe_fast.lower.steps import Call
from gpipe_fast.runtime.stage_memory import _course
from gpipe_fast.trace.joint_graph import JointGraph
from gpipe_fast.trace.trace import trace
from gpipe_fast.trace.traceability import Untraceable
from tests.distributed.launch import needs_gloo

pytestmark = needs_gloo
ops = torch.ops._c10d_functional


@pytest.fixture
def group() -> Iterator[str]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name  # type: ignore[union-attr]
    dist.destroy_process_group()


class Collective(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function, self.second = nn.Linear(4, 4), function, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x).tanh()).tanh())


def traced(function: Callable[[Tensor], Tensor]) -> JointGraph:
    with torch.no_grad():
        return trace([Collective(function)], [torch.zeros(2, 4)])


COLLECTIVES: dict[str, Callable[[Tensor, str], Any]] = {
    "all_reduce": lambda x, group: ops.all_reduce(x, "sum", group),
    "all_gather_into_tensor": lambda x, group: ops.all_gather_into_tensor(x, 1, group),
    "reduce_scatter_tensor": lambda x, group: ops.reduce_scatter_tensor(x, "sum", 1, group),
    "broadcast": lambda x, group: ops.broadcast(x, 0, group),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_step_of_a_program_starts_a_collective_and_waits(name: str, group: str) -> None:
    """If it waited later, another operator could write to the memory of its argument."""
    joint = traced(lambda x: ops.wait_tensor(COLLECTIVES[name](x, group)))
    program = lower(split(joint, 0.0).forward)
    names = [step.op._schema.name for step in program.steps if isinstance(step, Call)]
    assert [each for each in names if "c10d" in each] == [f"_c10d_functional::{name}"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_a_step_returns_what_other_processes_have_sent(dtype: torch.dtype, group: str) -> None:
    arguments = {"all_gather_into_tensor": (1,), "reduce_scatter_tensor": ("sum", 1), "broadcast": (0,)}
    arguments |= {"all_reduce": ("sum",), "all_to_all_single": ([2], [2])}
    for name, own in arguments.items():
        program, layout = Program(Arena(), torch.device("cpu")), Layout([2, 4], [4, 1], dtype)
        given, result = program.add_input(layout), program.add_result(layout)
        program.add_operator(f"_c10d_functional::{name}", "", [Value(given), *own, group], [result])
        program.set_outputs([result])
        x = torch.randn(2, 4, dtype=dtype)
        (found,), _ = program.run([x], [], True)
        assert torch.equal(found, x), name


def test_results_that_nothing_waits_for_are_refused(group: str) -> None:
    with pytest.raises(Untraceable, match="is used without a wait"):
        traced(lambda x: ops.all_reduce(x, "sum", group))


def test_collectives_with_several_results_are_refused(group: str) -> None:
    with pytest.raises(Untraceable, match="is no collective that programs can run"):
        traced(lambda x: ops.wait_tensor(ops.all_reduce_coalesced([x], "sum", group)[0]))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_results_of_collectives_count_as_memory(name: str, group: str) -> None:
    """Here the result and its argument are large, and all else is small."""
    rows = 2**16
    wide = traced(lambda x: ops.wait_tensor(COLLECTIVES[name](x.repeat(rows, 1), group)).sum(0, keepdim=True))
    program = lower_graphs(split(wide, 0.0).forward, None, AccumulationPolicy())[0]
    large = 2 * rows * 4 * 4
    course = _course(program.written(), False, torch.device("cpu"))
    assert 2 * large <= max(most for most, _ in course) < 2.1 * large
