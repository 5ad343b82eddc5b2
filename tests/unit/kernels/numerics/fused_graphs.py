"""Graphs with and without fused kernels: traces functions with their gradients, fuses and runs them.

Kernels run on the tested device; on the CPU that is Triton's interpreter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from gpipe_fast.fuse.fuse import Fused, fuse
from gpipe_fast.kernels.launch import INTERPRETED, Config
from gpipe_fast.lower.launch import KernelLaunch, is_launch
from gpipe_fast.lower.split import JOINT_POSITION, StageGraph, split
from gpipe_fast.randomness.random import make_key
from gpipe_fast.torch_private.operators import is_view_op
from gpipe_fast.trace.joint_graph import GraphRole
from tests.stages import trace_joint
from tests.unit.kernels.numerics.comparison import DEVICE, check

# A kernel adds in another order than PyTorch, and divides by a number as PyTorch does on a GPU.
ROUNDINGS = 2
Function = Callable[..., Tensor | Sequence[Tensor]]


@dataclass(frozen=True)
class Compared:
    """A graph and its fused form.

    Attributes:
        plain: the graph as traced.
        fused: its fused form.
    """

    plain: fx.Graph
    fused: Fused

    def left(self) -> list[str]:
        """Returns the names of the operators that remain besides views, as in ``aten.mul.Tensor``."""
        return [str(node.target) for node in operators_of(self.fused.graph.module.graph)]

    def num_launches(self) -> int:
        """Returns the number of kernel launches."""
        return len(self.fused.launches())


def operators_of(graph: fx.Graph) -> list[fx.Node]:
    """Returns the calls of operators that read or write memory: neither views nor launches."""
    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and node.target is not operator.getitem
        and not is_launch(node)
        and not is_view_op(node.target)
    ]


class _Layer(nn.Module):
    """A layer without parameters."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor | tuple[Tensor, ...]) -> Tensor | Sequence[Tensor]:
        return self.function(*([x] if isinstance(x, Tensor) else x))


def trace(
    function: Function, inputs: Sequence[Tensor], gradients: bool = True, recompute: bool = False
) -> Compared:
    """Traces and fuses a function, as a stage whose forward and backward are one graph.

    Args:
        function: takes the inputs, and returns a tensor or a tuple.
        inputs: tensors, of which shapes, strides and dtypes are read.
        gradients: whether the graph also computes the gradients of the floating-point inputs. It then reads
            the gradients of the outputs behind the inputs.
        recompute: whether the graph is instead that of a backward which recomputes the forward.
    """
    leaves = [t.detach().requires_grad_(gradients and t.is_floating_point()) for t in inputs]
    with torch.set_grad_enabled(gradients):
        joint = trace_joint([_Layer(function)], *leaves)
    if recompute:
        backward = split(joint, 0.0).backward
        assert backward is not None
        return Compared(backward.module.graph, fuse(backward))
    joint.module.graph.output_node().args = (tuple(output.node for output in joint.outputs),)
    joint.module.graph.eliminate_dead_code()
    for i, node in enumerate(joint.module.graph.nodes):
        node.meta[JOINT_POSITION] = i
    stage = StageGraph("forward", joint.module, joint.inputs, joint.outputs, {})
    return Compared(joint.module.graph, fuse(stage))


def values_of(compared: Compared, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the values of a graph's placeholders: the inputs, and random boundary gradients."""
    values = []
    for port, node in compared.fused.graph.inputs:
        like = node.meta["val"]
        if port.role is GraphRole.INPUT:
            values.append(inputs[port.index])
        elif port.role is GraphRole.TANGENT:
            empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=DEVICE)
            values.append(empty.copy_(torch.randn(like.shape)))
        else:
            values.append(make_key(0, 0).to(DEVICE))
    return values


def compare(compared: Compared, inputs: Sequence[Tensor]) -> None:
    """Asserts that the fused graph's error against float64 is at most twice the plain graph's.

    Results of other dtypes must be equal.
    """
    given = values_of(compared, inputs)
    plain = run(compared.plain, given)
    found = run(compared.fused.graph.module.graph, given)
    exact = run_in_float64(compared.plain, given)
    assert [t.dtype for t in found] == [t.dtype for t in plain]
    assert all(t.isfinite().all() for t in (*plain, *exact))
    floats = [i for i, t in enumerate(plain) if t.is_floating_point()]
    own, other, wide = ([each[i] for i in floats] for each in (found, plain, exact))
    largest = max((float(t.abs().max()) for t in wide if t.numel()), default=0.0)
    cancelled = [t.numel() > 0 and float(t.abs().max()) < 1e-12 * largest for t in wide]
    check(
        *([t for t, no in zip(each, cancelled, strict=True) if not no] for each in (own, other, wide)),
        ROUNDINGS,
    )
    # What cancels to nothing in float64 consists of rounding errors, whose size its own size does not tell.
    for t, eager, no in zip(own, other, cancelled, strict=True):
        rounding = torch.finfo(t.dtype).eps * largest
        assert not no or float(t.abs().max()) <= max(2 * float(eager.abs().max()), ROUNDINGS * rounding)
    for i, t in enumerate(plain):
        assert i in floats or torch.equal(found[i], t), i


def run(graph: fx.Graph, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Runs a graph, with its launches."""
    with torch.no_grad():
        return list(_Runner(nn.Module(), graph=graph).run(*inputs, enable_io_processing=False))


def run_in_float64(graph: fx.Graph, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Runs a graph's operators in float64."""
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    with torch.no_grad():
        return list(_InFloat64(nn.Module(), graph=graph).run(*wide, enable_io_processing=False))


class _InFloat64(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.dtype, _wide, (args, kwargs))
        return super().call_function(target, args, kwargs)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


class _Runner(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        if not is_launch(n):
            return super().run_node(n)
        args, _ = self.fetch_args_kwargs_from_env(n)
        return run_launch(args[0], args[1], n.meta["val"])


def run_launch(
    launch: KernelLaunch, arguments: Sequence[Any], results: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Runs a kernel.

    Args:
        launch: the launch.
        arguments: the arguments of `launch_kernel`.
        results: tensors like the kernel's outputs.
    """
    given = list(arguments)
    for i, like in zip(launch.outputs, results, strict=True):
        if given[i] is None:
            device = next(a.device for a in arguments if isinstance(a, Tensor))
            given[i] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        else:
            given[i] = given[i].clone()
    named = dict(zip((name for name, _ in launch.signature), given, strict=True))
    config = Config({}, launch.num_warps, launch.num_stages, launch.contracts)
    options = {} if INTERPRETED else config.options()
    launch.kernel[launch.grid](**named, **dict(launch.constants), **options)
    return tuple(given[i] for i in launch.outputs)
