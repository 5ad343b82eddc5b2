"""Nodes that compute a result in the memory of one of their arguments: kernels, and products that add."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from gpipe_fast.lower.alias import Source, is_read_once
from gpipe_fast.lower.launch import KernelLaunch, is_launch
from gpipe_fast.lower.operators import schema_order_arguments
from gpipe_fast.strides import bits_of
from gpipe_fast.trace.tensor_metadata import AnyTensor

aten = torch.ops.aten


def changed_input(node: fx.Node, output: int) -> fx.Node | None:
    """Returns the tensor whose copy a node changes to an output; None if the node only writes the output.

    ``addmm`` changes a copy of the matrix to which it adds a product. Its out variant makes no copy if the
    matrix is the out tensor.
    """
    if node.target is aten.addmm.default:
        first, _, _, beta, _ = schema_order_arguments(aten.addmm.default, node)
        assert isinstance(first, fx.Node)
        return first if beta == 1 and _layout(first) == _layout(node) else None
    if not is_launch(node):
        return None
    launch, arguments, *_ = node.args
    assert isinstance(launch, KernelLaunch)
    assert isinstance(arguments, (list, tuple))
    initial = arguments[launch.outputs[output]]
    return initial if isinstance(initial, fx.Node) else None


def _layout(node: fx.Node) -> tuple[object, ...]:
    value: AnyTensor = node.meta["val"]
    return value.shape, value.stride(), value.dtype, bits_of(value)


def memory_of(bases: Iterable[fx.Node], sources: Mapping[fx.Node, Source]) -> set[fx.Node]:
    """Returns the given values, and all values whose memory products overwrite to compute them.

    Args:
        bases: values that are no views.
        sources: the base of each value.
    """
    found, pending = set[fx.Node](), list(bases)
    while pending:
        base = pending.pop()
        found.add(base)
        changed = changed_input(base, 0)
        if changed is not None:
            source = sources[changed].base
            if source.op == "call_function" and is_read_once(source, base):
                pending.append(source)
    return found
