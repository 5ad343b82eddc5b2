"""Users' own Triton kernels: their launches in a joint graph, as launches that a program can run.

A kernel is compiled for what Triton's own launcher would compile it for: integers that are 1 become
constants, integers and pointers may be divisible by 16. If an autotuner has several configurations, it
chooses one here, with zeros in place of the tensors' contents. A launch that a program cannot do makes its
layer run in Python, where Triton launches the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import fx

from gpipe_fast.fuse.cubins import KernelLoader
from gpipe_fast.fuse.launchers import ALLOCATES
from gpipe_fast.lower.launch import (
    NUMBER_TYPES,
    KernelLaunch,
    is_divisible,
    launch_kernel,
    number_type,
    pointer_type,
)
from gpipe_fast.strides import may_overlap, overlaps_itself
from gpipe_fast.torch_private.operators import OpOverload, is_view_op
from gpipe_fast.trace.fake import real_arguments
from gpipe_fast.trace.joint_graph import JointGraph
from gpipe_fast.trace.traceability import Untraceable, layer_of
from gpipe_fast.trace.triton_calls import TritonCall, is_triton_call

_GRID_DIMS = 3


@dataclass(frozen=True)
class _Configuration:
    """What an autotuner chooses; the defaults are Triton's for a kernel without an autotuner."""

    grid: tuple[Any, ...]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Launch:
    """A launch and its run-time arguments, as the node of a launch has them."""

    data: KernelLaunch
    arguments: tuple[Any, ...]


def with_launches(joint: JointGraph, loader: KernelLoader | None) -> JointGraph:
    """Replaces users' launches in a joint graph by calls of `launch_kernel`, and loads their kernels.

    Args:
        joint: the joint graph of a traced stage.
        loader: compiles and loads kernels for the stage's device; None if no Triton kernel can run there.

    Returns:
        A graph without users' launches, ``joint`` itself if it has none.

    Raises:
        Untraceable: a kernel cannot be launched from C++.
    """
    launches: dict[fx.Node, _Launch] = {}
    for node in joint.module.graph.nodes:
        if is_triton_call(node):
            made = "its device is no CUDA device" if loader is None else _launch_of(node, loader)
            if isinstance(made, str):
                raise _untraceable(node, made)
            launches[node] = made
    if not launches or loader is None:
        return joint
    failures = loader.failures([launch.data for launch in launches.values()])
    for node, reason in zip(launches, failures, strict=True):
        if reason:
            raise _untraceable(node, reason)
    return _replaced(joint, launches)


def _untraceable(node: fx.Node, reason: str) -> Untraceable:
    name = _parts(node)[0].name
    return Untraceable(layer_of(node), f"its Triton kernel {name} cannot be launched from C++: {reason}")


def _parts(node: fx.Node) -> tuple[TritonCall, list[Any], tuple[Any, ...]]:
    """Returns a user's launch, the grids of its configurations, and its arguments."""
    call, grids, arguments = node.args
    assert isinstance(call, TritonCall)
    assert isinstance(grids, (list, tuple))
    assert isinstance(arguments, (list, tuple))
    return call, list(grids), tuple(arguments)


def _launch_of(node: fx.Node, loader: KernelLoader) -> _Launch | str:
    """Returns a user's launch as data, or the reason why a program cannot do it."""
    call, grids, arguments = _parts(node)
    passed = dict(zip(call.names, arguments, strict=True))
    chosen = _configuration(call, grids, passed, loader)
    if isinstance(chosen, str):
        return chosen
    defaults = {p.name: p.default for p in call.function.params if p.has_default}
    given = {**defaults, **passed, **dict(call.constants), **chosen.constants}
    given = {name: getattr(v, "value", v) if _is_constexpr(v) else v for name, v in given.items()}
    reason = next(_reasons(call, chosen, given, loader), None)
    return _made(call, chosen, given) if reason is None else reason


def _configuration(
    call: TritonCall, grids: list[Any], passed: Mapping[str, Any], loader: KernelLoader
) -> _Configuration | str:
    """Returns the configuration to use; asks the autotuner if it has several."""
    configs = getattr(call.kernel, "configs", None)
    if configs is None:
        return _Configuration(tuple(grids[0]), {})
    chosen = configs[0]
    if len(configs) > 1:
        try:
            chosen = _tuned(call, grids, passed, loader)
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            return f"its {len(configs)} configurations cannot be timed ({type(error).__name__}: {first})"
    grid = grids[configs.index(chosen)] if len(grids) > 1 else grids[0]
    options = {"num_ctas": 1, "maxnreg": None, "ir_override": None, "pre_hook": None}
    others = tuple(name for name, usual in options.items() if getattr(chosen, name, usual) != usual)
    return _Configuration(tuple(grid), chosen.kwargs, chosen.num_warps, chosen.num_stages, others)


def _tuned(call: TritonCall, grids: list[Any], passed: Mapping[str, Any], loader: KernelLoader) -> Any:
    """Launches a kernel on zeros, and returns the configuration that its autotuner chose."""
    with torch.no_grad(), torch.cuda.device(loader.device):
        given = {name: v.meta["val"] if isinstance(v, fx.Node) else v for name, v in passed.items()}
        call.launch(grids, real_arguments(given))
    return call.kernel.best_config


def _is_constexpr(value: Any) -> bool:
    return type(value).__name__ == "constexpr"


def _reasons(
    call: TritonCall, chosen: _Configuration, given: Mapping[str, Any], loader: KernelLoader
) -> Iterator[str]:
    """Yields every reason why a program cannot do a launch."""
    parameters = {p.name: p for p in call.function.params}
    if unknown := [name for name in given if name not in parameters]:
        yield f"the launch sets {', '.join(unknown)}"
    if missing := [name for name in parameters if name not in given]:
        yield f"the launch passes no {', '.join(missing)}"
    if chosen.others:
        yield f"its configuration sets {', '.join(chosen.others)}"
    if getattr(call.function, "pre_run_hooks", None) or getattr(call.function, "debug", None):
        yield "it has hooks, or is compiled for debugging"
    if len(chosen.grid) > _GRID_DIMS or not all(type(size) is int for size in chosen.grid):
        yield f"its grid is {chosen.grid}"
    for name, value in given.items():
        if name in parameters and not parameters[name].is_constexpr and not _type(parameters[name], value):
            yield f"its argument {name} is {_kind(value)}"
        if isinstance(value, fx.Node) and value.meta["val"].device != loader.device:
            yield f"its argument {name} is on {value.meta['val'].device}"
    yield from _aliases(call, {name: v for name, v in given.items() if isinstance(v, fx.Node)})


def _kind(value: Any) -> str:
    kind = value.meta["val"].dtype if isinstance(value, fx.Node) else type(value).__name__
    return f"of type {str(kind).removeprefix('torch.')}"


def _aliases(call: TritonCall, tensors: Mapping[str, fx.Node]) -> Iterator[str]:
    """Yields a reason for each written tensor that shares elements with itself or with another argument.

    In a graph these have different contents: what is written is a copy.
    """
    for written in call.written:
        value = tensors[written].meta["val"]
        if overlaps_itself(value.shape, value.stride()):
            yield f"it writes {written}, some of whose elements are the same"
    for written, other in product(call.written, tensors):
        a, b = tensors[written], tensors[other]
        if written != other and _memory(a) is _memory(b) and may_overlap(*_layouts(a, b)):
            yield f"its arguments {written} and {other} share memory that it writes"


def _layouts(*nodes: fx.Node) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    values = [node.meta["val"] for node in nodes]
    return [(tuple(v.shape), v.stride(), int(v.storage_offset())) for v in values]


def _memory(node: fx.Node) -> fx.Node:
    """Returns the value of which a value is a view."""
    while isinstance(node.target, OpOverload) and is_view_op(node.target):
        (node, *_) = node.all_input_nodes
    return node


def _type(parameter: Any, value: Any) -> str:
    """Returns the type that Triton gives a run-time argument; "" if a program cannot pass it."""
    if value is None:
        return "constexpr"
    if isinstance(value, fx.Node):
        return parameter.annotation_type or pointer_type(value.meta["val"].dtype, parameter.is_const)
    if type(value) not in (bool, int, float):
        return ""
    type_ = parameter.annotation_type or number_type(value)
    return type_ if type_ in NUMBER_TYPES else ""


def _is_constant(parameter: Any, value: Any) -> bool:
    """Returns whether a kernel is compiled for an argument's value."""
    is_one = type(value) is int and value == 1 and not parameter.annotation_type
    return bool(parameter.is_constexpr or value is None or (is_one and not parameter.do_not_specialize))


def _is_specialized_on_alignment(parameter: Any) -> bool:
    return not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)


def _made(call: TritonCall, chosen: _Configuration, given: Mapping[str, Any]) -> _Launch:
    constants = {p.name: given[p.name] for p in call.function.params if _is_constant(p, given[p.name])}
    run_time = [p for p in call.function.params if p.name not in constants]
    aligned = [_is_specialized_on_alignment(p) for p in run_time]
    values = [given[p.name] for p in run_time]
    launch = KernelLaunch(
        call.function,
        tuple((p.name, _type(p, value)) for p, value in zip(run_time, values, strict=True)),
        tuple(sorted(constants.items())),
        tuple(
            p.name
            for p, value, may in zip(run_time, values, aligned, strict=True)
            if may and is_divisible(value)
        ),
        chosen.num_warps,
        chosen.num_stages,
        grid=(*chosen.grid, *[1] * (_GRID_DIMS - len(chosen.grid))),
        outputs=tuple([p.name for p in run_time].index(name) for name in call.written),
        aligned=tuple(i for i, may in enumerate(aligned) if may and isinstance(values[i], fx.Node)),
    )
    return _Launch(launch, tuple(values))


def _replaced(joint: JointGraph, launches: Mapping[fx.Node, _Launch]) -> JointGraph:
    """Returns the graph with calls of `launch_kernel`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in joint.module.graph.nodes:
        if node in launches:
            copies[node] = _add_launch(graph, node, launches[node], copies)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return joint.with_graph(graph, copies)


def _add_launch(
    graph: fx.Graph, node: fx.Node, launch: _Launch, copies: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    outputs = launch.data.outputs
    arguments = tuple(
        None
        if i in outputs and _memory(a).target in ALLOCATES  # its contents are arbitrary
        else copies[a]
        if isinstance(a, fx.Node)
        else a
        for i, a in enumerate(launch.arguments)
    )
    given: tuple[Any, ...] = (launch.data, arguments, None, (), ())
    made = graph.call_function(launch_kernel, given, name=node.name)
    made.meta = dict(node.meta)
    return made
