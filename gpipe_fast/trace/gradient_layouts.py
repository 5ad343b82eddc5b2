"""Layouts in which boundary gradients arrive; they may differ from the boundary activations' layouts.

In eager mode a layer receives its gradient in the layout that the next layer produced: expanded by a mean,
channels_last from a convolution. Tracing assumes the output's own layout instead, with which products and
sums would round differently. So would they if the gradient were conjugated in memory that arrives as a
conjugated view. The traced stage therefore ends in an identity whose backward names the layout of the
arriving gradient::

    forward    y = layer(x) ──clone──▶ output
    backward   tangent ──arrive(strides, bits)──▶ layer's backward

`remove_arrive` then removes ``arrive`` from the graph and gives its layout to the tangent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from gpipe_fast.strides import NO_BITS, Bits, bits_of, with_bits
from gpipe_fast.trace.fake import hint
from gpipe_fast.trace.tensor_metadata import AnyTensor


class GradientLayout(NamedTuple):
    """The layout in which a gradient arrives."""

    strides: tuple[int, ...]
    bits: Bits = NO_BITS

    @classmethod
    def of(cls, tensor: AnyTensor) -> GradientLayout:
        """Returns the layout of a gradient; its sizes may be symbols."""
        return cls(tuple(map(hint, tensor.stride())), bits_of(tensor))


# By output or input, the layout of its gradient; no entry if none arrives.
ArrivingLayouts = dict[int, GradientLayout]
# (index, layout) of each output whose gradient has another layout than tracing assumes; None if no gradient
# arrives.
GradientLayouts = tuple[tuple[int, GradientLayout | None], ...]

# The operator has a fake kernel only: no program ever calls it.
torch.library.define("gpipe_fast::arrive", "(Tensor gradient, SymInt[] strides, bool[] bits) -> Tensor")


def _fake_arrive(gradient: Tensor, strides: Sequence[int], bits: Bits) -> Tensor:
    empty = torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device)
    return with_bits(empty, bits)


torch.library.register_fake("gpipe_fast::arrive", _fake_arrive)


class _RecordLayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, layout: GradientLayout) -> Tensor:
        ctx.layout = layout
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.ops.gpipe_fast.arrive(gradient, *ctx.layout), None


def clone_outputs(outputs: Sequence[Tensor], gradient_layouts: GradientLayouts) -> tuple[Tensor, ...]:
    """Clones a stage's outputs and marks the layouts in which their gradients arrive.

    An output that is a view of an input or of another output would get no gradient; clones are not views.
    Lowering removes the clones that turn out to be unnecessary. An output whose gradient never arrives is
    detached, so that it does not contribute a gradient of zeros to the backward.
    """
    known = dict(gradient_layouts)

    def clone(index: int, output: Tensor) -> Tensor:
        if index not in known:
            return output.clone()
        layout = known[index]
        if layout is None:
            return output.detach().clone()
        strides = _symbolic_strides(layout.strides, output.shape)
        arrived: Tensor = _RecordLayout.apply(output, GradientLayout(strides, layout.bits))
        return arrived

    return tuple(clone(index, output) for index, output in enumerate(outputs))


def _symbolic_strides(strides: tuple[int, ...], shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides as products of sizes if any size is a symbol, else unchanged.

    A gradient may be a slice of a larger one, along a dimension inside of the symbol's::

        shape (s0, 2, 8), slice of (s0, 4, 8): strides (32, 8, 1); 32 stays a number
    """
    if not any(isinstance(size, torch.SymInt) for size in shape):
        return strides
    found: list[int] = [0] * len(strides)
    expected: int = 1
    for dim in reversed(dim_order(strides)):
        if hint(expected) != strides[dim]:
            if isinstance(expected, torch.SymInt):
                raise RuntimeError(f"strides {strides} have gaps that may depend on sizes {tuple(shape)}")
            expected = strides[dim]
        found[dim] = expected
        expected = expected * shape[dim]
    return tuple(found)


def dim_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Returns the dimensions with nonzero stride (not expanded), from the largest stride to the smallest."""
    return tuple(sorted((d for d in range(len(strides)) if strides[d]), key=lambda d: (-strides[d], d)))


def remove_arrive(tangent: fx.Node) -> None:
    """Removes ``arrive`` behind a tangent and gives the tangent its layout."""
    for user in list(tangent.users):
        if user.target is torch.ops.gpipe_fast.arrive.default:
            user.replace_all_uses_with(tangent)
            tangent.meta["val"] = user.meta["val"]
            user.graph.erase_node(user)
