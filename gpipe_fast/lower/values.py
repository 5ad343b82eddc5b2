"""The values of a program while it is lowered: which value holds each of the graph's nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from gpipe_fast.lower.alias import Source, source_of
from gpipe_fast.lower.program import ProgramIR, StorageKind, Value
from gpipe_fast.lower.split import StageGraph
from gpipe_fast.lower.steps import Ref
from gpipe_fast.strides import bits_of
from gpipe_fast.trace.joint_graph import GraphRole
from gpipe_fast.trace.tensor_metadata import AnyTensor

# At run time, values of these kinds may have other strides than in the trace.
_ANY_LAYOUT = (StorageKind.INPUT, StorageKind.RESULT)
_PARAMETERS = {
    GraphRole.PARAMETER: StorageKind.PARAMETER,
    GraphRole.PARAMETER_CAST: StorageKind.PARAMETER_CAST,
}


class GraphValues:
    """The values of one graph, added to a program.

    Attributes:
        sources: the location of each node's value: itself, or a part of the memory of another node.
        index: the value of each node that owns memory, once it is added.
    """

    def __init__(self, program: ProgramIR, graph: StageGraph) -> None:
        """Finds the sources of all nodes.

        Args:
            program: receives the values.
            graph: the graph.
        """
        self._program = program
        self._graph = graph
        self.sources: dict[fx.Node, Source] = {n: source_of(n) for n in graph.module.graph.nodes}
        self.index: dict[fx.Node, int] = {}
        self._views: dict[int, list[tuple[Any, int]]] = {}
        self._kept_layouts: set[int] = set()

    def add(self, name: str, storage: StorageKind, like: AnyTensor, **where: Any) -> int:
        """Adds a value with the sizes, strides and dtype of ``like``; returns its index."""
        shape, strides = tuple(like.shape), tuple(like.stride())
        value = Value(name, storage, shape, strides, like.dtype, bits=bits_of(like), **where)
        self._program.values.append(value)
        return len(self._program.values) - 1

    def add_placeholders(self) -> None:
        """Adds the graph's placeholders and constants, and sets the program's inputs."""
        inputs = []
        for port, node in self._graph.inputs:
            like = node.meta["val"]
            if port.role in _PARAMETERS:
                self.index[node] = self.add(str(port), _PARAMETERS[port.role], like, index=port.index)
            else:
                saved = int(port.role in (GraphRole.SAVED, GraphRole.HELD))
                self.index[node] = self.add(str(port), StorageKind.INPUT, like, index=saved)
                inputs.append(port)
        self._program.inputs = tuple(inputs)
        for node in self._graph.module.graph.nodes:
            if node.op == "get_attr":
                constant = getattr(self._graph.module, str(node.target))
                self.index[node] = self.add(node.name, StorageKind.CONSTANT, constant, constant=constant)

    def add_base(self, base: fx.Node, storage: StorageKind) -> int:
        """Adds the value of a node that owns memory."""
        value = base.meta.get("val")
        like: AnyTensor = value if isinstance(value, AnyTensor) else torch.empty(0, device="meta")
        self.index[base] = self.add(base.name, storage, like)
        return self.index[base]

    def view(self, name: str, base: int, offset: int, like: AnyTensor) -> int:
        """Returns a view of ``base`` with the sizes and strides of ``like``, or ``base`` if it has them."""
        whole = self._program.values[base]
        layout = (offset, tuple(like.shape), tuple(like.stride()), bits_of(like))
        if layout == (0, whole.sizes, whole.strides, whole.bits):
            return base
        views = self._views.setdefault(base, [])
        for known, view in views:  # no dictionary, because formulas can only be compared
            if known == layout:
                return view
        views.append((layout, self.add(name, StorageKind.VIEW, like, index=base, offset=offset)))
        return views[-1][1]

    def keep_traced_layout(self, value: int) -> None:
        """Makes the program copy a value to the strides of the trace if it has others at run time.

        A program does so for inputs and results of operators that have a view: this adds one.
        """
        whole = self._program.values[value]
        if whole.storage in _ANY_LAYOUT and value not in self._kept_layouts:
            self._kept_layouts.add(value)
            self._program.values.append(replace(whole, storage=StorageKind.VIEW, index=value))

    def of(self, node: fx.Node) -> int:
        """Returns the value of a node, which may be a view."""
        base, offset = self.sources[node]
        return self.view(node.name, self.index[base], offset, node.meta["val"])

    def argument(self, argument: Any) -> Any:
        """Returns an operator's argument with values in place of nodes."""
        if isinstance(argument, fx.Node):
            return Ref(self.of(argument))
        if isinstance(argument, (list, tuple)):
            return [self.argument(a) for a in argument]
        return argument
