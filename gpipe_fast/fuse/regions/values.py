"""What a region computes: values, each with the values that it is computed from.

A node of a stage's graph has one value per result; an operator such as a norm has further values in between::

    y = native_layer_norm(x, w, b)    mean = sum(x) / n
                                      rstd = rsqrt(sum((x - mean)^2) / n + eps)
                                      y = (x - mean) * rstd * w + b
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor. Values are equal only to themselves.

    Attributes:
        shape: its shape.
        dtype: its dtype. Values between the operators of a graph are rounded to it.
    """

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Input(Value):
    """A tensor that a node outside of all regions computes, or a view that a region cannot express."""


@dataclass(frozen=True, eq=False)
class Constant(Value):
    """A number among an operator's arguments.

    Attributes:
        number: the number.
    """

    number: float


@dataclass(frozen=True, eq=False)
class Mapped(Value):
    """A tensor computed element by element from tensors that are broadcast to one shape.

    Attributes:
        template: the expression in Triton's language, with ``{0}`` for the first operand.
        operands: the operands, which are converted to fp32 first.
    """

    template: str
    operands: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class Reduced(Value):
    """A tensor reduced over some of its dimensions, which remain with size 1.

    Attributes:
        operation: ``sum`` or ``max``.
        operand: the tensor.
        dims: the dimensions, counted from the first.
    """

    operation: str
    operand: Value
    dims: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class View(Value):
    """The same elements in another shape.

    Attributes:
        operand: the tensor.
        order: the operand's dimensions in the view's order; None for a reshape or an expansion.
        expands: whether dimensions of size 1 are repeated.
    """

    operand: Value
    order: tuple[int, ...] | None = None
    expands: bool = False


def operands_of(value: Value) -> Sequence[Value]:
    """Returns the values that a value is computed from."""
    if isinstance(value, Mapped):
        return value.operands
    if isinstance(value, (Reduced, View)):
        return (value.operand,)
    return ()


def root_of(value: Value) -> Value:
    """Returns the value behind views."""
    while isinstance(value, View):
        value = value.operand
    return value
