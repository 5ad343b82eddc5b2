"""Templates: one trace with symbols for the sizes that vary, instantiated for the shapes of each call.

Tracing a stage takes a tenth of a second or more, instantiating a template much less. A template is verified:
instantiated for the shapes that were traced with fixed sizes, it must give the same graphs, operator by
operator. For all other shapes the template's guards are checked: the conditions on sizes that PyTorch
recorded during the trace::

    input shape     (4, 17, 64)   (4, 23, 64)   (4, 9, 64)                         (4, 31, 64), ...
    traced          fixed sizes   fixed sizes   (4, s0, 64)                        -
    instantiated    -             -             s0 = 17, 23 to verify; s0 = 9      s0 = 31, ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy  # type: ignore[import-untyped, unused-ignore]
import torch
from torch import Tensor, fx

from gpipe_fast.strides import bits_of, span, with_bits
from gpipe_fast.torch_private.fake_tensors import FakeTensorMode, from_meta
from gpipe_fast.trace.formulas import Formulas
from gpipe_fast.trace.gradient_layouts import GradientLayouts
from gpipe_fast.trace.joint_graph import (
    GraphPort,
    GraphRole,
    JointGraph,
    PortTensor,
    TracedPorts,
)
from gpipe_fast.trace.symbols import CannotExpressError, Symbols, evaluated
from gpipe_fast.trace.tensor_metadata import AnyTensor, TensorMetadata
from gpipe_fast.trace.triton_calls import is_triton_call

_Symbolic = (torch.SymInt, torch.SymBool, torch.SymFloat)


@dataclass(frozen=True, eq=False)
class Template:
    """A graph with symbolic sizes, to be instantiated.

    Attributes:
        joint: the graph.
        symbols: the symbols of the inputs' sizes, and the guards on them.
        derived: what other packages derive from the template, by its type.
    """

    joint: JointGraph
    symbols: Symbols
    derived: dict[type, Any] = field(default_factory=dict, repr=False)

    def at(
        self,
        shapes: Sequence[Sequence[int]],
        strides: Sequence[Sequence[int]],
        gradient_layouts: GradientLayouts,
    ) -> Instance | None:
        """Returns the template's instance for inputs of given shapes and strides.

        Args:
            shapes: the shape of each input.
            strides: the strides of each input.
            gradient_layouts: the layouts of the gradients; as in the template's trace, at these sizes.

        Returns:
            The instance; None if the template does not hold for these inputs.
        """
        values = self.symbols.solve(shapes, strides)
        if values is None:
            return None
        try:
            instance = Instance(self, values)
            inputs, tangents = instance.ports.of(GraphRole.INPUT), instance.ports.of(GraphRole.TANGENT)
        except CannotExpressError:
            return None
        if any(tensor.stride() != tuple(strides[i]) for i, tensor in inputs.items()):
            return None
        for index, wanted in gradient_layouts:
            if wanted is not None and tangents[index].stride() != tuple(wanted.strides):
                return None
        return instance

    def with_formulas(self, values: Mapping[sympy.Symbol, int]) -> tuple[JointGraph, Formulas]:
        """Returns the graph with formulas for sizes, which take decisions as at the given values.

        Raises:
            CannotExpressError: a size or a tensor has no formula.
        """
        formulas = Formulas(values)
        return _Writer(formulas.number, TensorMetadata.of).write(self.joint), formulas

    @functools.cached_property
    def calls_triton(self) -> bool:
        """Whether the layers call kernels of their own."""
        return any(map(is_triton_call, self.joint.module.graph.nodes))

    @functools.cached_property
    def ports(self) -> TracedPorts:
        """The ports of the graph."""
        return self.joint.ports

    @functools.cached_property
    def sized_ports(self) -> frozenset[GraphPort]:
        """The ports whose tensors have symbols for sizes."""
        ports = (*self.ports.inputs, *self.ports.outputs)
        return frozenset(port for port, tensor in ports if tensor is not None and _has_symbol(tensor))


@dataclass(eq=False)
class Instance:
    """A template at given sizes.

    Attributes:
        template: the template.
        values: the values of its symbols.
    """

    template: Template
    values: Mapping[sympy.Symbol, int]

    @functools.cached_property
    def joint(self) -> JointGraph:
        """The graph at these sizes, written out on first use."""
        return _Writer(functools.cache(self._number), _fake_tensors()).write(self.template.joint)

    def _number(self, expression: sympy.Expr) -> Any:
        return evaluated(expression, self.values)

    def written(self) -> JointGraph | None:
        """Returns the graph if it is written out."""
        return vars(self).get("joint")

    def drop_joint(self) -> None:
        """Forgets the graph; it can be written out again."""
        vars(self).pop("joint", None)

    @functools.cached_property
    def ports(self) -> TracedPorts:
        """The ports of the graph."""
        writer, known = _Writer(self._number, TensorMetadata.of), self.template.ports

        def at(ports: Sequence[PortTensor]) -> tuple[PortTensor, ...]:
            return tuple(
                PortTensor(port, writer.value(tensor)) if port in self.template.sized_ports else known
                for known in ports
                for port, tensor in [known]
            )

        return replace(known, inputs=at(known.inputs), outputs=at(known.outputs))


def _has_symbol(tensor: AnyTensor) -> bool:
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return any(isinstance(each, _Symbolic) for each in numbers)


def _fake_tensors() -> Callable[[Tensor, Sequence[int], Sequence[int], int], Tensor]:
    """Returns a function that makes fake tensors of one mode from metadata, sizes, strides and an offset."""
    mode = FakeTensorMode()

    def make(value: Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
        meta = torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
        if offset:
            memory = torch.empty(offset + span(sizes, strides), dtype=value.dtype, device="meta")
            meta = memory.as_strided(sizes, strides, offset)
        return from_meta(mode, with_bits(meta, bits_of(value)), value.device)

    return make


class _Writer:
    """Copies a graph with other numbers in place of those with symbols."""

    def __init__(self, number: Callable[[sympy.Expr], Any], tensor: Callable[..., AnyTensor]) -> None:
        """Makes a writer.

        Args:
            number: replaces an expression of symbols.
            tensor: makes the metadata of a tensor from the metadata with symbols, a shape, strides and an
                offset.
        """
        self._number_of = number
        self._tensor = tensor

    def write(self, joint: JointGraph) -> JointGraph:
        """Returns the copy."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        numbers: dict[fx.Node, Any] = {}

        def argument(node: fx.Node) -> Any:
            return numbers[node] if node in numbers else copies[node]

        for node in joint.module.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, _Symbolic) or (node.op == "call_function" and isinstance(value, int)):
                numbers[node] = self._number(value)
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
            copy = graph.create_node(
                node.op, node.target, self._substitute(args), self._substitute(kwargs), node.name
            )
            copy.meta = {**node.meta, "val": self.value(value)} if "val" in node.meta else dict(node.meta)
            copies[node] = copy
        return joint.with_graph(graph, copies)

    def value(self, value: Any) -> Any:
        """Returns a node's value: a tensor's metadata, a number, or a list of these."""
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.value, value))
        if not isinstance(value, Tensor):
            return self._number(value)
        sizes, strides = [self._number(s) for s in value.shape], [self._number(s) for s in value.stride()]
        return self._tensor(value, sizes, strides, self._number(value.storage_offset()))

    def _substitute(self, argument: Any) -> Any:
        """Returns an argument with other numbers in place of those with symbols."""
        if isinstance(argument, _Symbolic):
            return self._number(argument)
        if isinstance(argument, (list, tuple)):
            return type(argument)(map(self._substitute, argument))
        if isinstance(argument, dict):
            return {k: self._substitute(v) for k, v in argument.items()}
        return argument

    def _number(self, value: Any) -> Any:
        if not isinstance(value, _Symbolic):
            return value
        if isinstance(value, torch.SymFloat):  # SymPy's exact arithmetic rounds differently from Python's
            raise CannotExpressError
        return self._number_of(value.node.expr)


def equal(a: JointGraph, b: JointGraph) -> bool:
    """Returns whether two graphs are the same: operators, arguments, shapes and ports."""
    are_equal: bool = _content(a) == _content(b)
    return are_equal


def _content(joint: JointGraph) -> Any:
    """Returns all that a graph consists of, with numbers in place of nodes."""
    numbers = {node: f"%{i}" for i, node in enumerate(joint.module.graph.nodes)}
    rows = []
    for node in numbers:
        arguments = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
        rows.append((node.op, _target(joint, node), repr(arguments), _metadata(node.meta.get("val"))))
    ports = [(port, numbers[node]) for port, node in (*joint.inputs, *joint.outputs)]
    return rows, ports, joint.structure, joint.stashed


def _target(joint: JointGraph, node: fx.Node) -> Any:
    """Returns the operator that a node calls, or the shape and dtype of the constant that it refers to."""
    if node.op != "get_attr":
        return node.target if node.op == "call_function" else None
    constant = getattr(joint.module, str(node.target))
    return (tuple(constant.shape), constant.dtype) if isinstance(constant, Tensor) else None


def _metadata(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_metadata, value))
    if isinstance(value, Tensor):
        layout = tuple(value.shape), value.stride(), value.storage_offset(), bits_of(value)
        return layout, value.dtype, value.device
    return value
