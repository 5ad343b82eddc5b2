"""The terms of a parameter's gradient within one backward graph."""

from __future__ import annotations

import torch
from torch import fx

from gpipe_fast.lower.alias import readers_of
from gpipe_fast.strides import bits_of
from gpipe_fast.trace.tensor_metadata import AnyTensor

aten = torch.ops.aten


class Gradient:
    """The gradient of one parameter, from its terms to the accumulator.

    Attributes:
        index: the parameter's index.
        parts: the nodes of its terms, in the order in which they are added.
        value: the accumulator's value, once it exists.
        sum: the value of the parts' sum, if the parts are summed before they are accumulated.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.parts: list[fx.Node] = []
        self.value: int | None = None
        self.sum: int | None = None


def gradient_terms(node: fx.Node, uses: int) -> tuple[list[fx.Node], list[fx.Node]]:
    """Returns the terms that autograd summed to a gradient, in autograd's order, and the nodes of the sums.

    Autograd adds the gradient of each use of a parameter to one running sum over all micro-batches; summing
    within a micro-batch first would round differently.
    """
    parts: list[fx.Node] = []
    sums: list[fx.Node] = []
    while (
        len(parts) + 1 < uses and node.target is aten.add.Tensor and not node.kwargs and len(node.users) == 1
    ):
        left, right = node.args
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
            break
        parts.append(right)
        sums.append(node)
        node = left
    return [node, *reversed(parts)], sums


def is_read_only_through(base: fx.Node, part: fx.Node) -> bool:
    """Returns whether ``base`` is read only through ``part``, which is read once."""
    return [read for read, _ in readers_of(base)] == [part]


def is_dense(tensor: AnyTensor) -> bool:
    """Returns whether the elements, as they are read, fill a block of memory without gaps or overlaps."""
    if any(bits_of(tensor)):
        return False
    expected = 1
    for stride, size in sorted(
        (st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
