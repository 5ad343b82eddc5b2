"""How the gradient of a parameter is put together within one backward graph."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from gpipe_fast.lower.alias import count_reads, source_of

aten = torch.ops.aten


class Gradient:
    """The gradient of one parameter on its way into the accumulator."""

    def __init__(self, index: int, node: fx.Node) -> None:
        self.index = index
        self.node = node
        self.parts: list[fx.Node] = []
        self.value: int | None = None  # the accumulator
        self.sum: int | None = None  # of the parts, where they are added up before


def contributions(node: fx.Node, uses: int) -> tuple[list[fx.Node], list[fx.Node]]:
    """The terms of a gradient that autograd summed, in its order, and the sums that they replace.

    Autograd adds the gradient of each use of a parameter to one running sum over all micro-batches; adding
    up within a micro-batch first would round differently.
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


def only_leads_to(base: fx.Node, part: fx.Node) -> bool:
    """Whether nothing reads ``base`` but views on the way to ``part``, read once as a gradient."""
    pending, seen = [base], {base}
    while pending:
        node = pending.pop()
        for user in node.users:
            if node is part:
                if sum(count_reads(u, part) for u in part.users) > 1:
                    return False
            elif source_of(user).base is not base:
                return False
            elif user not in seen:
                seen.add(user)
                pending.append(user)
    return part in seen


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a block of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(
        (st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
