"""Boundary gradients in the layout in which they arrive, which need not be that of the boundary activation.

In eager mode a gradient reaches a layer as the next one laid it out: expanded by a mean, channels_last from a
convolution. Tracing assumes the layout of the output instead, and products and sums would round otherwise. So
the traced stage ends in an identity whose backward names the layout that arrives::

    forward    y = layer(x) ──clone──▶ output
    backward   tangent ──arrive(strides)──▶ layer's backward

and afterwards ``arrive`` is taken out: its argument is what it stood for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gpipe_fast.trace.fake import hint

# Of the outputs whose gradient differs from what tracing assumes: its strides, or None if none arrives.
Arrivals = tuple[tuple[int, tuple[int, ...] | None], ...]

# Never called: no kernel, only a shape.
torch.library.define("gpipe_fast::arrive", "(Tensor gradient, SymInt[] strides) -> Tensor")


def _arrive(gradient: Tensor, strides: Sequence[int]) -> Tensor:
    return torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device)


torch.library.register_fake("gpipe_fast::arrive", _arrive)


class _Arrives(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, strides: tuple[int, ...]) -> Tensor:
        ctx.strides = strides
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.ops.gpipe_fast.arrive(gradient, ctx.strides), None


def finish(outputs: Sequence[Tensor], arrivals: Arrivals) -> tuple[Tensor, ...]:
    """Clones a stage's outputs, noting how their gradients arrive.

    Clones, so that no output is a view of an input or of another output: such get no gradient. Lowering
    drops those that copy for nothing. An output whose gradient never comes must not enter the backward as a
    gradient of zeros.
    """
    known = dict(arrivals)

    def one(index: int, output: Tensor) -> Tensor:
        if index not in known:
            return output.clone()
        strides = known[index]
        if strides is None:
            return output.detach().clone()
        arrived: Tensor = _Arrives.apply(output, _symbolic(strides, output.shape))
        return arrived

    return tuple(one(index, output) for index, output in enumerate(outputs))


def _symbolic(strides: tuple[int, ...], shape: Sequence[int]) -> tuple[int, ...]:
    """Strides as products of sizes, where those are symbols."""
    if not any(isinstance(size, torch.SymInt) for size in shape):
        return strides
    found: list[int] = [0] * len(strides)
    expected: int = 1
    for dim in reversed(layout_of(strides)):
        if hint(expected) != strides[dim]:
            raise RuntimeError(f"strides {strides} are not those of a dense tensor, permuted or expanded")
        found[dim] = expected
        expected = expected * shape[dim]
    return tuple(found)


def layout_of(strides: Sequence[int]) -> tuple[int, ...]:
    """The dimensions that are not expanded, from the slowest to the fastest."""
    return tuple(sorted((d for d in range(len(strides)) if strides[d]), key=lambda d: (-strides[d], d)))


def take_out(tangent: fx.Node) -> None:
    """Lets a tangent be what ``arrive`` makes of it."""
    for user in list(tangent.users):
        if user.target is torch.ops.gpipe_fast.arrive.default:
            user.replace_all_uses_with(tangent)
            tangent.meta["val"] = user.meta["val"]
            user.graph.erase_node(user)
