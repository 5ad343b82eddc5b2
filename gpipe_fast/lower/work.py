"""Counts the bytes that a lowered program reads and writes, and its launches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from gpipe_fast._extension import ActiveRuns
from gpipe_fast.lower.program import ProgramIR, StorageKind, Value
from gpipe_fast.lower.steps import (
    Accumulate,
    AccumulateAll,
    Call,
    Launch,
    Step,
    is_written,
    values_in,
    values_written,
)
from gpipe_fast.strides import span
from gpipe_fast.torch_private.operators import OpOverload

aten = torch.ops.aten
# In-place operators that do not read the tensor that they write.
OVERWRITES = {aten.copy_, aten.fill_, aten.zero_, aten.bernoulli_, aten.normal_, aten.uniform_}
# Operators that read at most one element per row of the argument at this index, which is not counted.
NOT_READ_ARGUMENT = {aten.nll_loss_forward: 0, aten.nll_loss_backward: 1}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"}
ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_", "_cudnn_attention_")


@dataclass
class Work:
    """What a program does for one micro-batch, except for the first one of a mini-batch.

    Attributes:
        read: bytes that steps read, except products and attention.
        written: bytes that steps write, except products and attention.
        moved_by: bytes read and written by the name of the operator or of the kernel. Accumulations are named
            ``accumulate``.
        launches_of: steps that launch a kernel by the same names, including products and attention. An
            operator may launch several kernels, but counts as one.
    """

    read: int = 0
    written: int = 0
    moved_by: dict[str, int] = field(default_factory=dict)
    launches_of: dict[str, int] = field(default_factory=dict)

    @property
    def moved(self) -> int:
        """The bytes read and written, added."""
        return self.read + self.written

    @property
    def launches(self) -> int:
        """The number of launches."""
        return sum(self.launches_of.values())


@dataclass(frozen=True)
class Access:
    """The values that one step reads and writes, under the name of its operator or kernel."""

    name: str
    read: tuple[int, ...]
    written: tuple[int, ...]


def count(program: ProgramIR) -> Work:
    """Counts what a program does for one micro-batch, except for the first one of a mini-batch.

    A step reads each element of its arguments once, also where an argument is expanded or several arguments
    show the same memory. It writes each element of its results once; a result that no step uses is not
    counted, because the program does not know its size.
    """
    work = Work()
    for access in map(access_of, program.steps):
        if access is None:
            continue
        work.launches_of[access.name] = work.launches_of.get(access.name, 0) + 1
        if is_product_or_attention(access.name):
            continue
        read, written = (_bytes(program.values, indices) for indices in (access.read, access.written))
        work.read += read
        work.written += written
        work.moved_by[access.name] = work.moved_by.get(access.name, 0) + read + written
    return work


def is_product_or_attention(name: str) -> bool:
    """Returns whether an operator is a matrix product, a convolution or fused attention."""
    return name in PRODUCTS or name.startswith(ATTENTION)


def is_attention(node: fx.Node) -> bool:
    """Returns whether a node of a graph is fused attention."""
    return isinstance(node.target, OpOverload) and operator_name(node).startswith(ATTENTION)


def operator_name(node: fx.Node) -> str:
    """Returns the name of a node's operator, without its overload, or that of another function."""
    if isinstance(node.target, OpOverload):
        return str(node.target._schema.name.partition("::")[2])
    return str(getattr(node.target, "__name__", node.target))


def access_of(step: Step) -> Access | None:
    """Returns what a step accesses; None if it launches nothing, or only in a mini-batch's first run."""
    match step:
        case Call(when=ActiveRuns.FIRST) | Accumulate(when=ActiveRuns.FIRST):
            return None
        case AccumulateAll(when=ActiveRuns.FIRST) | Launch(when=ActiveRuns.FIRST):
            return None
        case Call():
            return _access_of_call(step)
        case Launch(launch, arguments):
            read = [argument for i, argument in enumerate(arguments) if i not in launch.outputs]
            return Access(launch.name, tuple(values_in(read)), step.written())
        case Accumulate(accumulator, value):
            return Access("accumulate", (accumulator, value), (accumulator,))
        case AccumulateAll(accumulators, values):
            return Access("accumulate", (*accumulators, *values), accumulators)
    return None


def _access_of_call(call: Call) -> Access:
    operator = call.op.overloadpacket
    unread = NOT_READ_ARGUMENT.get(operator)
    read: list[int] = []
    arguments = zip(call.arguments, call.op._schema.arguments, strict=True)
    for position, (argument, schema) in enumerate(arguments):
        # An out argument is not read; another written argument is, unless the operator overwrites it.
        overwritten = schema.is_out or (is_written(schema) and operator in OVERWRITES)
        if not overwritten and position != unread:
            read += values_in(argument)
    name = call.op._schema.name.partition("::")[2]
    return Access(name, tuple(read), tuple(values_written(call)))


def _bytes(values: Sequence[Value], indices: Iterable[int]) -> int:
    """Returns the bytes of some values; memory that several of them show is counted once."""
    shown: dict[int, list[Value]] = {}
    for index in set(indices):
        value = values[index]
        base = value.index if value.storage is StorageKind.VIEW else index
        shown.setdefault(base, []).append(value)
    return sum(min(sum(map(_own_bytes, views)), _span_bytes(views)) for views in shown.values())


def _own_bytes(value: Value) -> int:
    """Returns the bytes of a value's elements; dimensions of stride zero are counted as one element."""
    extents = (size for size, stride in zip(value.sizes, value.strides, strict=True) if stride or not size)
    return math.prod(extents) * value.dtype.itemsize


def _span_bytes(views: Sequence[Value]) -> int:
    """Returns the bytes in the union of the ranges of memory that views of one value span."""
    length = end = 0
    for view in sorted(views, key=lambda view: view.offset):
        behind = view.offset + span(view.sizes, view.strides)
        length += max(0, behind - max(view.offset, end))
        end = max(end, behind)
    return length * views[0].dtype.itemsize
