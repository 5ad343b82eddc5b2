"""Alias analysis of a functional graph: which values are views of other values."""

from __future__ import annotations

import operator
from typing import NamedTuple, cast

import torch
from torch import fx

from gpipe_fast.strides import bits_of
from gpipe_fast.torch_private.operators import OpOverload, is_view_op
from gpipe_fast.trace.collectives import is_wait
from gpipe_fast.trace.tensor_metadata import AnyTensor

aten = torch.ops.aten

# Copies that can be elided: in a graph without in-place operators, a copy with its original's strides can be
# replaced by its original.
_ELIDABLE_COPIES = frozenset(
    {aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default, aten._unsafe_view.default}
)


class Source(NamedTuple):
    """The location of a value: it starts ``offset`` elements into ``base``, which is not a view itself."""

    base: fx.Node
    offset: int


def source_of(node: fx.Node) -> Source:
    """Returns the value that owns the memory of ``node``, behind any views and elided copies."""
    offset = 0
    while True:
        step = _viewed_by(node)
        if step is None:
            return Source(node, offset)
        node, delta = step
        offset += delta


def is_elided_copy(node: fx.Node) -> bool:
    """Returns whether a value is a copy that the owner of its memory replaces, or a view of one."""
    while (step := _viewed_by(node)) is not None:
        if node.target is aten.clone.default:
            return True
        node, _ = step
    return False


def _viewed_by(node: fx.Node) -> tuple[fx.Node, int] | None:
    producer: object = node
    if node.target is operator.getitem:
        producer = node.args[0]
    assert isinstance(producer, fx.Node)
    if not isinstance(producer.target, OpOverload) or not producer.all_input_nodes:
        return None
    original = producer.args[0] if producer.args else None
    value = node.meta.get("val")
    if not isinstance(original, fx.Node) or not isinstance(value, AnyTensor):
        return None
    seen = original.meta.get("val")
    if not isinstance(seen, AnyTensor) or not _same_dtype_and_device(value, seen):
        return None
    if producer.target in _ELIDABLE_COPIES:
        if bits_of(value) != bits_of(seen):
            return None
        if producer.target is aten._unsafe_view.default:
            return original, 0
        return (original, 0) if value.stride() == seen.stride() and value.shape == seen.shape else None
    if is_wait(producer):
        return original, 0
    if is_view_op(producer.target):
        return original, cast(int, value.storage_offset() - seen.storage_offset())
    return None


def _same_dtype_and_device(a: AnyTensor, b: AnyTensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.device == b.device
        and a.layout is torch.strided
        and b.layout is torch.strided
    )


def count_reads(user: fx.Node, node: fx.Node) -> int:
    """Returns how many of ``user``'s arguments are ``node``."""
    found = 0

    def look(argument: fx.Node) -> fx.Node:
        nonlocal found
        found += argument is node
        return argument

    fx.map_arg((user.args, user.kwargs), look)
    return found


def readers_of(base: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Returns who reads a value: for each read, the value or a view of it, and the node that reads that."""
    found: list[tuple[fx.Node, fx.Node]] = []
    pending, seen = [base], {base}
    while pending:
        node = pending.pop()
        for user in node.users:
            if source_of(user).base is not base:
                found += [(node, user)] * count_reads(user, node)
            elif user not in seen:
                seen.add(user)
                pending.append(user)
    return found


def getitem_nodes(node: fx.Node, count: int) -> list[fx.Node | None]:
    """Returns the nodes that select each of a node's ``count`` results; None for an unused result."""
    found: list[fx.Node | None] = [None] * count
    for user in node.users:
        if user.target is operator.getitem and isinstance(user.args[1], int):
            found[user.args[1]] = user
    return found
