"""The nodes of a graph that regions can compute."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from gpipe_fast.fuse.regions import composites, operators
from gpipe_fast.fuse.regions.operators import DTYPES, Unsupported
from gpipe_fast.fuse.regions.values import Input, Value, View, operands_of, root_of
from gpipe_fast.lower.operators import named_arguments
from gpipe_fast.torch_private.operators import OpOverload

aten = torch.ops.aten

_RESHAPES = frozenset(
    {
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
        aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.detach.default, aten.alias.default,
    }
)  # fmt: skip
# So that the columns of the last block, which are int32, do not overflow.
_MAX_ELEMENTS = 2**31 - 2**11


@dataclass(eq=False)
class Unit:
    """A node that regions can compute.

    Attributes:
        node: the operator's node.
        position: its position in the graph.
        values: everything that it computes, each after its operands; no views.
        results: by node that stands for a result, the result: one of the values, or a view of one.
        reads: what it reads: results of other units and tensors from elsewhere, behind views.
    """

    node: fx.Node
    position: int
    values: tuple[Value, ...]
    results: Mapping[fx.Node, Value]
    reads: tuple[Value, ...] = field(default=())

    def __repr__(self) -> str:
        return f"Unit({self.node.name})"


class UnitGraph:
    """All units of a graph.

    Attributes:
        units: the units, in the graph's order.
        by_value: the unit that computes a value.
        node_of: the node of each result, by the value behind it; and of each input.
        transparent: the nodes that are views for regions, or select results.
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self.units: list[Unit] = []
        self.by_value: dict[Value, Unit] = {}
        self.node_of: dict[Value, fx.Node] = {}
        self.transparent: set[fx.Node] = set()
        self._values: dict[fx.Node, Value] = {}
        for position, node in enumerate(nodes):
            self._add(node, position)

    def value_of(self, node: fx.Node) -> Value:
        """Returns a node's value; an input for what regions cannot compute."""
        if node not in self._values:
            tensor = node.meta["val"]
            self._values[node] = Input(tuple(tensor.shape), tensor.dtype)
            self.node_of[self._values[node]] = node
        return self._values[node]

    def _add(self, node: fx.Node, position: int) -> None:
        if node.op != "call_function" or node in self._values:
            return
        value = node.meta.get("val")
        if node.target is operator.getitem:
            self.transparent.add(node)  # of an operator that is no unit
        elif isinstance(value, Tensor) and self._is_view(node, value):
            pass
        elif _may_compute(node):
            try:
                self._add_unit(node, position)
            except Unsupported:
                return

    def _is_view(self, node: fx.Node, tensor: Tensor) -> bool:
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if source is None or not isinstance(source.meta.get("val"), Tensor):
            return False
        shape, dtype = tuple(tensor.shape), tensor.dtype
        rank = source.meta["val"].dim()
        arguments: list[Any] = list(node.args[1:])
        if node.target in _RESHAPES:
            view = View(shape, dtype, self.value_of(source))
        elif node.target is aten.expand.default:
            view = View(shape, dtype, self.value_of(source), None, True)
        elif node.target is aten.permute.default:
            view = View(shape, dtype, self.value_of(source), tuple(d % rank for d in arguments[0]))
        elif node.target is aten.transpose.int or (node.target is aten.t.default and rank == 2):
            order = list(range(rank))
            a, b = (d % rank for d in (arguments or (0, 1)))
            order[a], order[b] = b, a
            view = View(shape, dtype, self.value_of(source), tuple(order))
        else:
            return False
        self._values[node] = view
        self.transparent.add(node)
        return True

    def _add_unit(self, node: fx.Node, position: int) -> None:
        assert isinstance(node.target, OpOverload)
        named = named_arguments(node.target, node)
        given: dict[str, Any] = {
            name: self.value_of(a) if isinstance(a, fx.Node) else a for name, a in named.items()
        }
        results = _results(node)
        if composites.is_composite(node.target):
            found: Any = composites.expand(node.target, given, [*results.values()])
        else:
            (tensor,) = results.values()
            assert tensor is not None
            found = [operators.map_operator(node.target, given, tensor)]
        by_node = self._by_node(node, found)
        values = tuple(_in_order(by_node.values(), self.by_value))
        unit = Unit(node, position, values, by_node)
        computed = set(values)
        reads = (root_of(o) for v in values for o in operands_of(v))
        unit.reads = tuple(dict.fromkeys(r for r in reads if r not in computed))
        self.units.append(unit)
        for value in values:
            self.by_value[value] = unit
        for result, value in by_node.items():
            self._values[result] = value
            self.node_of[root_of(value)] = result
            if result is not node:
                self.transparent.add(result)

    def _by_node(self, node: fx.Node, found: composites.Results) -> dict[fx.Node, Value]:
        if isinstance(node.meta["val"], Tensor):
            assert found[0] is not None
            return {node: found[0]}
        selected = {u.args[1]: u for u in node.users if u.target is operator.getitem}
        return {selected[i]: value for i, value in enumerate(found) if i in selected and value is not None}


def _results(node: fx.Node) -> dict[int, Tensor | None]:
    """Returns the results of a node that are used, by index."""
    value = node.meta["val"]
    if isinstance(value, Tensor):
        return {0: value}
    used = {u.args[1] for u in node.users if u.target is operator.getitem}
    return {i: t if i in used else None for i, t in enumerate(value)}


def _in_order(results: Iterable[Value], others: Container[Value]) -> Iterator[Value]:
    """Yields the values that results are computed from, and that no other node computes, operands first."""
    seen: set[Value] = set()

    def visit(value: Value) -> Iterator[Value]:
        if value in seen or value in others or isinstance(value, Input):
            return
        seen.add(value)
        for operand in operands_of(value):
            yield from visit(operand)
        if not isinstance(value, View):
            yield value

    for result in results:
        yield from visit(result)


def _may_compute(node: fx.Node) -> bool:
    """Returns whether a node's operator and tensors are of a kind that regions compute."""
    target = node.target
    if not (operators.is_element_wise(target) or composites.is_composite(target)):
        return False
    given = [n.meta.get("val") for n in node.all_input_nodes]
    value = node.meta.get("val")
    found = value if isinstance(value, (list, tuple)) else [value]
    tensors = [t for t in (*given, *found) if isinstance(t, Tensor)]
    if len({t.device for t in tensors}) != 1 or not all(map(_is_supported, tensors)):
        return False
    return not any(t is None for t in given)


def _is_supported(tensor: Tensor) -> bool:
    readable = tensor.layout is torch.strided and not tensor.is_neg()
    return tensor.dtype in DTYPES and readable and 0 < tensor.numel() <= _MAX_ELEMENTS
