"""Patterns: functions of PyTorch operators, traced once and then searched for in stages' graphs.

A pattern is traced with the sizes and numbers that this file defines. In a match, each of them stands for
one size or number of the graph, the same wherever the pattern has it::

    pattern                               graph                               match
    x: fp32[5, 19]                        view: fp32[32, 1000]                5 -> 32, 19 -> 1000
    y = _log_softmax(x, 1, False)         y = _log_softmax(view, 1, False)
    nll_loss_forward(y, t, 1, -10037)     nll_loss_forward(y, u, 1, -100)     ignore_index -> -100
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from gpipe_fast.lower.operators import schema_order_arguments
from gpipe_fast.torch_private.fake_tensors import FakeTensorMode
from gpipe_fast.torch_private.graphs import make_fx
from gpipe_fast.torch_private.operators import OpOverload

aten = torch.ops.aten

# Sizes in patterns: batch, length, heads (of keys, if these have fewer), columns, half and all of a head's
# columns, classes. All sizes that arise from them, such as batch times length, differ.
BATCH, LENGTH, HEADS, KEY_HEADS, COLUMNS, HALF, HEAD, CLASSES = 5, 7, 13, 23, 11, 17, 34, 19
_SMALLEST_SIZE = 5
# Numbers in patterns, by the name under which a match returns the graph's number. With label smoothing: the
# weight of the target, and of each class.
IGNORE_INDEX, TARGET_WEIGHT, CLASS_WEIGHT = -10037, 1 - 0.0987654321, 0.0987654321 / CLASSES
NUMBERS: dict[float, str] = {
    IGNORE_INDEX: "ignore_index", TARGET_WEIGHT: "target_weight", CLASS_WEIGHT: "class_weight",
}  # fmt: skip

# Operators by those that compute the same.
_SAME = {aten._unsafe_view.default: aten.view.default, aten.reshape.default: aten.view.default}
# What `Tensor.detach` is in a graph; it depends on PyTorch's version and tracer.
_ALIASES = frozenset({aten.detach.default, aten.alias.default})
_COMMUTATIVE = frozenset({aten.add.Tensor, aten.mul.Tensor})
# Arguments without a meaning here, and the dtype of the result, which is compared itself.
_NOT_COMPARED = frozenset({"device", "layout", "pin_memory", "non_blocking", "memory_format", "dtype"})
# Operators whose ``dim`` counts the dimensions of their inputs, so that -1 is the last one.
_DIM_OF_INPUTS = frozenset(
    {
        aten._log_softmax.default,
        aten._log_softmax_backward_data.default,
        aten.cat.default,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.sum.dim_IntList,
        aten.transpose.int,
    }
)
# Arguments that are sizes of the result, which is compared instead.
_SIZES = frozenset({"size", "input_sizes"})


def _target(node: fx.Node) -> Any:
    return _SAME.get(node.target, node.target)  # type: ignore[call-overload]


@dataclass(frozen=True)
class TracedPattern:
    """A traced pattern.

    Attributes:
        inputs: the placeholders.
        outputs: the results.
        targets: all operators of the graph.
    """

    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    targets: frozenset[Any]
    graph: fx.Graph = field(repr=False)


def trace_pattern(
    function: Callable[..., Any], inputs: Sequence[tuple[Sequence[int], torch.dtype]]
) -> TracedPattern:
    """Traces a pattern.

    Args:
        function: takes tensors, and returns a tensor or a tuple of tensors. It may call
            `torch.autograd.grad`.
        inputs: the shape and dtype of each argument.
    """
    with FakeTensorMode():
        # On a GPU some operators return other dtypes.
        examples = [torch.empty(tuple(shape), dtype=dtype, device="cuda") for shape, dtype in inputs]
        graph = make_fx(lambda *tensors: function(*tensors))(*examples).graph
    graph.eliminate_dead_code()
    (results,) = graph.output_node().args
    outputs = tuple(map(strip, results if isinstance(results, (list, tuple)) else (results,)))
    targets = frozenset(_target(n) for n in graph.nodes if n.op == "call_function" and n is strip(n))
    return TracedPattern(tuple(graph.find_nodes(op="placeholder")), outputs, targets, graph)


def strip(node: Any) -> fx.Node:
    """Returns the node behind nodes that change nothing: `detach`, `alias`, and views of the same shape."""
    while isinstance(node, fx.Node) and _changes_nothing(node):
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _changes_nothing(node: fx.Node) -> bool:
    if node.target in _ALIASES:
        return True
    if _target(node) is not aten.view.default:
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return bool(before.shape == after.shape and before.stride() == after.stride())


@dataclass
class Match:
    """A match of a pattern in a graph.

    Attributes:
        nodes: the graph's node of each of the pattern's nodes.
        sizes: the graph's size for each of the pattern's sizes.
        numbers: the graph's numbers, by name.
    """

    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    def copy(self) -> Match:
        """Returns a copy, for an attempt."""
        return Match(dict(self.nodes), dict(self.sizes), dict(self.numbers))


class Graph:
    """The nodes of a graph by operator, for searches."""

    def __init__(self, graph: fx.Graph) -> None:
        self.by_target: dict[Any, list[fx.Node]] = {}
        self._position = {node: index for index, node in enumerate(graph.nodes)}
        self._tensors: set[tuple[torch.dtype, tuple[int, ...]]] = set()
        for node in graph.nodes:
            if node.op == "call_function":
                self.by_target.setdefault(_target(node), []).append(node)
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                self._tensors.add((value.dtype, tuple(value.shape)))

    def may_have_inputs(self, inputs: Iterable[tuple[Sequence[int], torch.dtype]]) -> bool:
        """Returns whether the graph has tensors that a pattern with these shapes and dtypes may take."""
        return all(
            any(dtype == own and _may_be_shape(shape, size) for own, size in self._tensors)
            for shape, dtype in inputs
        )

    def has(self, *targets: Any) -> bool:
        """Returns whether the graph has all these operators."""
        return all(target in self.by_target for target in targets)

    def may_have(self, pattern: TracedPattern) -> bool:
        """Returns whether the graph has all operators of the pattern."""
        return pattern.targets <= self.by_target.keys()

    def matches(self, pattern: TracedPattern) -> Iterator[Match]:
        """Yields the matches of a pattern, at most one for each node that may be its first output."""
        for node in self.by_target.get(_target(pattern.outputs[0]), ()):
            match = self._extend(Match(), pattern.outputs[0], node)
            for output in pattern.outputs[1:]:
                match = match and self._find(match, output)
            if match is not None:
                yield match

    def _find(self, match: Match, output: fx.Node) -> Match | None:
        """Matches a further output of the pattern by the closest node: layers that are alike share inputs."""
        if output in match.nodes:
            return match
        taken = {*match.nodes.values()}
        last = max(self._position[n] for n in taken)
        nodes = [n for n in self.by_target.get(_target(output), ()) if n not in taken]
        for node in sorted(nodes, key=lambda n: abs(self._position[n] - last)):
            found = self._extend(match.copy(), output, node)
            if found is not None:
                return found
        return None

    def _extend(self, match: Match, wanted: fx.Node, node: Any) -> Match | None:
        """Matches a node and all nodes before it; None if they differ. May change ``match``."""
        if not isinstance(node, fx.Node):
            return None
        wanted, node = strip(wanted), strip(node)
        if wanted in match.nodes:
            return match if match.nodes[wanted] is node else None
        if not _same_result(match, wanted.meta.get("val"), node.meta.get("val")):
            return None
        if wanted.op == "placeholder":
            match.nodes[wanted] = node
            return match
        if node.op != "call_function" or _target(node) is not _target(wanted):
            return None
        found = self._extend_by_arguments(match, wanted, node)
        if found is not None:
            found.nodes[wanted] = node
        return found

    def _extend_by_arguments(self, match: Match, wanted: fx.Node, node: fx.Node) -> Match | None:
        ours, theirs = arguments_of(wanted), arguments_of(node)
        if _commutes(wanted, ours) and _commutes(node, theirs):
            for order in ("self", "other"), ("other", "self"):
                swapped = {**theirs, "self": theirs[order[0]], "other": theirs[order[1]]}
                found = self._extend_by(match.copy(), ours, swapped)
                if found is not None:
                    return found
            return None
        return self._extend_by(match, ours, theirs)

    def _extend_by(self, match: Match, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Match | None:
        found: Match | None = match
        for name, argument in ours.items():
            if name in _NOT_COMPARED or name in _SIZES:
                continue
            found = found and self._extend_by_argument(found, argument, theirs[name])
        return found

    def _extend_by_argument(self, match: Match, ours: Any, theirs: Any) -> Match | None:
        if isinstance(ours, fx.Node):
            return self._extend(match, ours, theirs)
        if isinstance(ours, (list, tuple)):
            if not isinstance(theirs, (list, tuple)) or len(ours) != len(theirs):
                return None
            found: Match | None = match
            for a, b in zip(ours, theirs, strict=True):
                found = found and self._extend_by_argument(found, a, b)
            return found
        return match if _same_number(match, ours, theirs) else None


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Returns a node's arguments by name; those of functions that are no operators by position.

    Dimensions are counted from the first.
    """
    if not isinstance(node.target, OpOverload):
        return {str(i): a for i, a in enumerate(node.args)} | node.kwargs
    names = (a.name for a in node.target._schema.arguments)
    found = dict(zip(names, schema_order_arguments(node.target, node), strict=True))
    if node.target in _DIM_OF_INPUTS:
        rank = node.all_input_nodes[0].meta["val"].dim()
        for name in found.keys() & {"dim", "dim0", "dim1"}:
            found[name] = _from_first(found[name], rank)
    return found


def _from_first(dims: Any, rank: int) -> Any:
    if isinstance(dims, int):
        return dims % max(rank, 1)
    return None if dims is None else [_from_first(dim, rank) for dim in dims]


def _commutes(node: fx.Node, arguments: Mapping[str, Any]) -> bool:
    return (
        node.target in _COMMUTATIVE
        and isinstance(arguments["other"], fx.Node)
        and arguments.get("alpha", 1) == 1
    )


def _same_result(match: Match, ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, Tensor):
        return not isinstance(theirs, Tensor)
    if not isinstance(theirs, Tensor) or ours.dtype != theirs.dtype or ours.dim() != theirs.dim():
        return False
    return all(_same_size(match, a, b) for a, b in zip(ours.shape, theirs.shape, strict=True))


def _may_be_shape(ours: Sequence[int], theirs: Sequence[int]) -> bool:
    return len(ours) == len(theirs) and all(
        a == b or a >= _SMALLEST_SIZE for a, b in zip(ours, theirs, strict=True)
    )


def _same_size(match: Match, ours: int, theirs: int) -> bool:
    if ours < _SMALLEST_SIZE:
        return ours == theirs
    return match.sizes.setdefault(ours, theirs) == theirs


def _same_number(match: Match, ours: Any, theirs: Any) -> bool:
    if isinstance(ours, bool) or not isinstance(ours, (int, float)):
        return bool(ours == theirs)
    name = NUMBERS.get(ours)
    if isinstance(theirs, bool) or not isinstance(theirs, (int, float)):
        return False
    if name is not None:
        return match.numbers.setdefault(name, theirs) == theirs
    # A number of the pattern that is one of its sizes is that size of the graph.
    sizes: dict[float, float] = {float(a): b for a, b in match.sizes.items()}
    return sizes.get(ours, ours) == theirs
