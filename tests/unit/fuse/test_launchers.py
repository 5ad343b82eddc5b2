"""Launchers are traced to functional graphs whose nodes launch kernels."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, fx

from gpipe_fast.fuse.launchers import CannotLaunch, launches_in, trace_launcher
from gpipe_fast.kernels.launch import Config, launch
from gpipe_fast.lower.launch import KernelLaunch, is_launch
from tests.unit.fuse.triton_kernels import double, not_specialized, split_in_two

aten = torch.ops.aten
CONFIG = Config({"BLOCK": 32}, num_warps=2, num_stages=3)


def trace(function: Callable[..., Any], *shapes: Sequence[int], device: str = "cuda") -> fx.Graph:
    return trace_launcher(function, [torch.empty(tuple(s), device="meta") for s in shapes])


def doubled(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    launch(double, (2,), CONFIG, x, y, x.numel())
    return y


def launch_nodes(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if is_launch(node)]


def results_of(graph: fx.Graph) -> Any:
    return graph.output_node().args[0]


def test_a_launch_returns_what_it_writes() -> None:
    graph = trace(lambda x: (doubled(x.exp()),), (4, 8))
    exp, launched, got = (n for n in graph.nodes if n.op == "call_function")
    found, arguments, check, checked, earlier = launched.args
    assert is_launch(launched)
    assert arguments == (exp, None, 32)
    assert (check, checked, earlier) == (None, (), ())
    assert got.args == (launched, 0)
    assert results_of(graph) == (got,)
    assert [tuple(v.shape) for v in (got.meta["val"], *launched.meta["val"])] == [(4, 8)] * 2
    assert found == KernelLaunch(
        kernel=double, signature=(("p_x", "*fp32"), ("p_y", "*fp32"), ("size", "i32")),
        constants=(("BLOCK", 32),), divisible=("size",), grid=(2, 1, 1), num_warps=2, num_stages=3,
        outputs=(1,), aligned=(0, 1),
    )  # fmt: skip
    assert found.name == "triton_kernels.double"
    assert launches_in(graph) == [found]


def test_outputs_may_come_before_inputs_and_be_unused() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        low, high = x.new_empty(4), torch.empty(8, device=x.device, dtype=torch.bfloat16)
        launch(split_in_two, (1,), CONFIG, low, x, high, 3, 16, 0.5, True)
        return (low,)

    graph = trace(function, (32,))
    (launched,) = launch_nodes(graph)
    launch_, arguments, *_ = launched.args
    assert isinstance(launch_, KernelLaunch)
    assert launch_.outputs == (0, 2)
    (x,) = graph.find_nodes(op="placeholder")
    assert arguments == (None, x, None, 3, 16, 0.5, True)
    assert [(tuple(t.shape), t.dtype) for t in launched.meta["val"]] == [
        ((4,), torch.float32),
        ((8,), torch.bfloat16),
    ]
    assert [n.args[1] for n in launched.users] == [0, 1]


def test_types_and_divisibility_of_arguments() -> None:
    def types(size: int, offset: int, scale: float, flag: bool) -> KernelLaunch:
        def function(x: Tensor) -> tuple[Tensor, ...]:
            low = torch.empty_like(x)
            launch(split_in_two, (1,), CONFIG, x, low, x, size, offset, scale, flag)
            return (low,)

        (found,) = launches_in(trace(function, (32,)))
        return found

    names = ("p_x", "p_low", "p_high", "size", "offset", "scale", "flag")
    pointers = ("*fp32",) * 3
    found = types(32, 0, 32.0, True)
    assert found.signature == tuple(zip(names, (*pointers, "i32", "i32", "fp32", "u1"), strict=True))
    assert found.divisible == ("size", "offset")
    found = types(2**31, -(2**31) - 1, 0.0, False)
    assert [type_ for _, type_ in found.signature[3:]] == ["i64", "i64", "fp32", "u1"]
    assert types(2**31 - 1, 1, 0.0, False).divisible == ()
    assert [type_ for _, type_ in types(2**31 - 1, -(2**31), 0.0, False).signature[3:5]] == ["i32"] * 2
    assert found.pack(3, 2**31) == struct.pack("q", 2**31)
    assert found.pack(5, 0.5) == struct.pack("f", 0.5)
    assert found.pack(6, True) == b"\1"


def test_what_a_kernel_does_not_specialize_is_not_declared() -> None:
    """Not even integers that are divisible; every grid has three dimensions."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y, z = torch.empty_like(x), torch.empty_like(x)
        launch(not_specialized, (1,), CONFIG, x, y, 32, 32)
        launch(split_in_two, (2, 3), CONFIG, x, x, z, 1, 1, 0.5, True)
        return y, z

    first, second = launches_in(trace(function, (32,)))
    assert first.divisible == ("size",)
    assert (first.grid, second.grid) == ((1, 1, 1), (2, 3, 1))


def written(*grid: int, size: Any = 1) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.empty_like(x)
        launch(double, grid, CONFIG, x, y, size)
        return (y,)

    return function


def part_of_an_allocation(x: Tensor) -> tuple[Tensor, ...]:
    both = x.new_empty(2, *x.shape)
    launch(double, (1,), CONFIG, x, both[1], 1)
    return (both,)


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "empty grid": written(0),
    "another type": written(1, size=None),
    "read before it is written": lambda x: (doubled(torch.empty_like(x).exp()),),
    "returned but not written": lambda x: (doubled(x), torch.empty_like(x)),
    "part of an allocation": part_of_an_allocation,
    # A check could not replace wrong results.
    "computed from what is written": lambda x: (doubled(x), doubled(x).sum(0)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_program_cannot_run_is_refused(name: str) -> None:
    with pytest.raises(CannotLaunch, match=r"no(t what a)? kernel has written|has type NoneType"):
        trace(REFUSED[name], (4, 8))


def test_tracing_keeps_strides_and_needs_no_gpu() -> None:
    x = torch.empty(8, 4, device="meta").t()
    graph = trace_launcher(lambda x: (doubled(x),), [x])
    (launched,) = launch_nodes(graph)
    assert launched.meta["val"][0].stride() == (1, 4)
    assert not torch.cuda.is_initialized()


def test_launches_that_differ_in_numbers_and_grid_share_a_kernel() -> None:
    found = [launches_in(trace(lambda x: (doubled(x),), shape))[0] for shape in ((4, 8), (4, 12), (3, 3))]
    one, other, not_divisible = found
    assert one.specialization == other.specialization != not_divisible.specialization
    assert dataclasses.replace(one, grid=(7, 1, 1)).specialization == one.specialization
    namesake = Mock(fn=FunctionType(double.fn.__code__, {}, "double"))
    namesake.fn.__module__ = "another.triton_kernels"
    assert dataclasses.replace(one, kernel=namesake).name == one.name
    for change in (
        {"num_warps": 4},
        {"constants": ()},
        {"signature": ()},
        {"divisible": ()},
        {"aligned": ()},
        {"constants": (("BLOCK", 32.0),)},  # equal, but another constant
        {"kernel": namesake},
    ):
        assert dataclasses.replace(one, **change).specialization != one.specialization
