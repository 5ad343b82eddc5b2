"""Tracing of launchers, which are functions that launch kernels, to graphs whose nodes launch them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from gpipe_fast.kernels import launch as kernel_launch
from gpipe_fast.lower.alias import source_of
from gpipe_fast.lower.launch import (
    KernelLaunch,
    is_divisible,
    is_launch,
    launch_kernel,
    number_type,
    pointer_type,
)
from gpipe_fast.torch_private.fake_tensors import FakeTensorMode
from gpipe_fast.torch_private.graphs import make_fx

aten = torch.ops.aten

# Makes a launch visible to the tracer; it has no kernel. Its first argument is an index into
# `_Recorder.launches`.
_library = torch.library.Library("gpipe_fast_fuse", "DEF")
_library.define("launch(int index, Tensor(a!)[] tensors) -> ()")
torch.library.register_fake("gpipe_fast_fuse::launch", lambda index, tensors: None, lib=_library)

# Their results are uninitialized.
ALLOCATES = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_permuted.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)


class CannotLaunch(Exception):
    """A launcher does something that a program cannot do; the message says what."""


class _Recorder:
    """Records launches in order, with None in place of tensors."""

    def __init__(self) -> None:
        self.launches: list[tuple[KernelLaunch, list[Any]]] = []

    def __call__(
        self,
        kernel: Any,
        grid: Sequence[int],
        config: kernel_launch.Config,
        arguments: Sequence[Any],
        constants: dict[str, Any],
    ) -> None:
        names = [name for name in kernel.arg_names if name not in constants and name not in config.blocks]
        named = list(zip(names, arguments, strict=True))
        x, y, z = (*grid, 1, 1)[:3]
        launch = KernelLaunch(
            kernel,
            tuple((name, _type_of(argument)) for name, argument in named),
            tuple(sorted({**constants, **config.blocks}.items())),
            tuple(n for n, a in named if is_divisible(a) and n not in _not_specialized(kernel)),
            config.num_warps,
            config.num_stages,
            config.contracts,
            grid=(x, y, z),
            outputs=(),
            aligned=tuple(i for i, (_, a) in enumerate(named) if isinstance(a, Tensor)),
        )
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        self.launches.append((launch, [None if isinstance(a, Tensor) else a for a in arguments]))
        torch.ops.gpipe_fast_fuse.launch(len(self.launches) - 1, tensors)


def _not_specialized(kernel: Any) -> Sequence[Any]:
    """Returns the arguments whose values a kernel is not compiled for."""
    given = getattr(kernel, "do_not_specialize", None)
    return given if given is not None else getattr(kernel, "kwargs", {}).get("do_not_specialize") or ()


def _type_of(argument: Any) -> str:
    found, kind = "", type(argument).__name__
    if isinstance(argument, Tensor):
        found, kind = pointer_type(argument.dtype), str(argument.dtype)
    elif isinstance(argument, (int, float)):
        found = number_type(argument)
    if not found:
        raise CannotLaunch(f"a kernel's argument has type {kind}")
    return found


def trace_launcher(function: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.Graph:
    """Traces a launcher.

    Args:
        function: takes tensors, allocates its results with ``torch.empty`` and the like, launches kernels
            with `gpipe_fast.kernels.launch.launch` and calls functional operators. It returns a tuple of
            tensors.
        inputs: tensors with the shapes, strides, dtypes and devices of the arguments; their contents are not
            read.

    Returns:
        A functional graph: launches are nodes that call `launch_kernel`. Its output is a tuple of nodes.

    Raises:
        CannotLaunch: a tensor is read that no kernel has written, a kernel's argument has no known type, or a
            result is computed from what kernels have written; it may only be a view of that.
    """
    recorder = _Recorder()
    with FakeTensorMode(), kernel_launch.recording_launches(recorder):
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in inputs]
        traced = make_fx(function)(*fakes).graph
    return _functional(traced, recorder)


def _functional(traced: fx.Graph, recorder: _Recorder) -> fx.Graph:
    """Returns the graph with launches that return what they write."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    uninitialized: set[fx.Node] = set()
    for node in traced.nodes:
        if node.target is torch.ops.gpipe_fast_fuse.launch.default:
            _add_launch(graph, copies, uninitialized, node, recorder)
            continue
        if node.target in ALLOCATES:
            uninitialized.add(node)
            continue
        if node.op == "output":
            _check_results(graph.output(fx.map_arg(node.args[0], lambda n: _read(n, copies))))
            continue
        copies[node] = graph.node_copy(node, lambda n: _read(n, copies))
    return graph


def _check_results(output: fx.Node) -> None:
    """Raises `CannotLaunch` if a `ReplacementCheck` could not replace wrong results."""
    if launches_in(output.graph):
        for node in output.all_input_nodes:
            if source_of(node).base.target is not operator.getitem:
                raise CannotLaunch(f"{node.name} is not what a kernel has written")


def _read(node: fx.Node, copies: dict[fx.Node, Any]) -> fx.Node:
    if node not in copies:
        raise CannotLaunch(f"{node.name} is read, but no kernel has written it")
    return copies[node]  # type: ignore[no-any-return]


def _add_launch(
    graph: fx.Graph,
    copies: dict[fx.Node, Any],
    uninitialized: set[fx.Node],
    node: fx.Node,
    recorder: _Recorder,
) -> None:
    index, tensors = node.args
    assert isinstance(index, int)
    assert isinstance(tensors, (list, tuple))
    launch, arguments = recorder.launches[index]
    remaining = iter(tensors)
    given = [next(remaining) if a is None else a for a in arguments]
    outputs = tuple(i for i, a in enumerate(given) if isinstance(a, fx.Node) and a in uninitialized)
    launch = replace(launch, outputs=outputs)
    inputs = [
        None if i in outputs else _read(a, copies) if isinstance(a, fx.Node) else a
        for i, a in enumerate(given)
    ]
    launched = graph.call_function(launch_kernel, (launch, tuple(inputs), None, (), ()))  # type: ignore[arg-type]
    launched.meta["val"] = tuple(given[i].meta["val"] for i in outputs)
    for position, i in enumerate(outputs):
        result = graph.call_function(operator.getitem, (launched, position))
        result.meta["val"] = given[i].meta["val"]
        copies[given[i]] = result
        uninitialized.discard(given[i])


def launches_in(graph: fx.Graph) -> list[KernelLaunch]:
    """Returns the launches of a graph, in order."""
    return [n.args[0] for n in graph.nodes if is_launch(n)]
