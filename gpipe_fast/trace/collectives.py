"""Collectives in graphs: operators that exchange tensors with the other processes of a group.

A functional collective only starts; `wait_tensor`, which follows, returns its result, in the same memory::

    all_reduce = all_reduce(mm, 'sum', group)       started: nothing may read the result, or write mm
    wait       = wait_tensor(all_reduce)            a view of all_reduce: the same values, now complete

A step of a program starts one and waits (csrc/program/collective.h), and `wait_tensor` is taken for a view.
So no graph is split between the two, and the argument's memory is not used again.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import fx

from gpipe_fast.torch_private.collectives import GROUP, NAMESPACE
from gpipe_fast.torch_private.operators import OpOverload

# The collectives with one result, which is waited for.
SUPPORTED = frozenset(
    {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast"}
)


@functools.cache
def group_position(op: OpOverload[Any, Any]) -> int | None:
    """Returns the position of the argument that names a process group; None if an operator has none."""
    names = [argument.name for argument in op._schema.arguments]
    return names.index(GROUP) if GROUP in names else None


def is_wait(node: fx.Node) -> bool:
    """Returns whether a node waits for the result of a collective."""
    return isinstance(node.target, OpOverload) and node.target._schema.name == f"{NAMESPACE}::wait_tensor"


def is_collective(node: fx.Node) -> bool:
    """Returns whether a node exchanges tensors with other processes."""
    return isinstance(node.target, OpOverload) and group_position(node.target) is not None


def starts(node: fx.Node) -> bool:
    """Returns whether a node starts a collective for whose result something has to wait."""
    return is_collective(node) and isinstance(node.target, OpOverload) and node.target.namespace == NAMESPACE


def unsupported(node: fx.Node) -> str | None:
    """Returns why a program cannot run a collective; None if it can."""
    target = node.target
    if not isinstance(target, OpOverload) or not (target.namespace == NAMESPACE or is_collective(node)):
        return None
    if is_wait(node):
        (waited,) = node.all_input_nodes
        return None if starts(waited) else f"{target} waits for no collective of the same graph"
    if target.namespace == NAMESPACE and target.overloadpacket.__name__ not in SUPPORTED:
        return f"{target} is no collective that programs can run"
    if starts(node) and not all(map(is_wait, node.users)):
        return f"the result of {target} is used without a wait"
    return None
