"""Gradients of a tensor from which query, key and value were taken, concatenated in their final layout.

Autograd stacks the three gradients, or adds three tensors of zeros in each of which it has written one of
them, and copies the result to the layout of the tensor. One concatenation writes the same elements there;
only -0.0 may be 0.0 in autograd's sums. A kernel (kernels/stack.py) is used where the tensor is the output of
a linear layer with a bias, whose gradient it sums in the same pass::

    autograd  dq, dk, dv -> stack -> permute -> clone -> view -> sum
    here      dq, dk, dv -> cat; with the bias's gradient: dq, dk, dv -> kernel
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpipe_fast.fuse.family import GRADIENTS, Case, Numbers, Results
from gpipe_fast.fuse.patterns import BATCH, COLUMNS, HEAD, HEADS, LENGTH
from gpipe_fast.kernels.stack import launch_stack

aten = torch.ops.aten

# Shapes of a query, by the order of its dimensions: batch, heads, length, columns of a head or of all heads.
_BHLC = (BATCH, HEADS, LENGTH, HEAD)
_BLHC = (BATCH, LENGTH, HEADS, HEAD)
_LBC = (LENGTH, BATCH, COLUMNS)


def cases(stream: torch.dtype, own: torch.dtype) -> Iterator[Case]:
    """Yields the cases of one dtype; none for a mix of two."""
    if stream == own:
        for packing in PACKINGS:
            yield packing.case(own)
            yield packing.case_with_sums(own)
        yield SPLIT.case_with_sums(own)


@dataclass(frozen=True)
class Packing:
    """A way to take query, key and value from one tensor.

    Attributes:
        name: for reports.
        shape: the shape of the gradients of query, key and value.
        packed: the shape of the tensor.
        take: returns query, key and value.
        anchor: an operator of the gradient.
        order: the order of dimensions in which the gradients are concatenated.
        dim: the dimension, in this order, in which they are.
        has_copies: whether each of the gradients is copied first.
        summed: the dimensions over which the bias's gradient is summed, once heads are part of the columns.
            (0,) is the sum over the rows of a matrix.
    """

    name: str
    shape: tuple[int, ...]
    packed: tuple[int, ...]
    take: Callable[[Tensor], Sequence[Tensor]]
    anchor: Any
    order: tuple[int, ...]
    dim: int
    has_copies: bool = False
    summed: tuple[int, ...] = (0,)

    def case(self, dtype: torch.dtype) -> Case:
        """Returns the case of one dtype."""
        name, arguments = f"gradients of {self.name}", ((self.shape, dtype),) * 3
        return Case(name, self.pattern, arguments, self.launch, self.anchor, phase=GRADIENTS)

    def case_with_sums(self, dtype: torch.dtype) -> Case:
        """Returns the case of one dtype with the gradient of a bias."""
        name, arguments = f"gradients of {self.name}, column sums", ((self.shape, dtype),) * 3
        return Case(
            name, self.pattern_with_sums, arguments, self.launch_with_sums, self.anchor, phase=GRADIENTS,
            also=(aten.sum.dim_IntList,),
        )  # fmt: skip

    def pattern_with_sums(self, *gradients: Tensor) -> Results:
        """The gradients of the tensor and of the bias in operators."""
        (found,) = self.pattern(*gradients)
        rows = found if found.dim() == 3 else found.flatten(2)
        if self.summed == (0,):
            rows = rows.flatten(0, 1)
        return found, rows.sum(self.summed, True)

    def launch_with_sums(self, numbers: Numbers, *gradients: Tensor) -> Results:
        """The gradients of the tensor and of the bias by a kernel."""
        parts = [g.permute(self.order) for g in gradients]
        heads = [part if part.dim() == 4 else part.unsqueeze(2) for part in parts]
        matrix, sums = launch_stack(heads, heads_first=self.dim == 3)
        shape = (*parts[0].shape[: self.dim], 3, *parts[0].shape[self.dim :])
        stacked = matrix.view(shape).flatten(len(self.packed) - 1)
        return stacked, sums.view(*[1] * len(self.summed), -1)

    def pattern(self, *gradients: Tensor) -> Results:
        """The gradient of the tensor in operators."""
        if self.has_copies:
            gradients = tuple(g.clone(memory_format=torch.contiguous_format) for g in gradients)
        with torch.enable_grad():
            packed = gradients[0].new_empty(self.packed).requires_grad_()
            (found,) = torch.autograd.grad(self.take(packed), packed, gradients)
        return (found.contiguous(),)

    def launch(self, numbers: Numbers, *gradients: Tensor) -> Results:
        """The gradient of the tensor by one concatenation."""
        parts = [g.permute(self.order) for g in gradients]
        before, after = parts[0].shape[: self.dim], parts[0].shape[self.dim :]
        # PyTorch concatenates contiguous tensors of few dimensions fastest.
        if all(part.is_contiguous() for part in parts):
            parts = [part.flatten(self.dim) for part in parts]
        stacked = torch.cat(parts, self.dim).view(*before, 3, *after)
        return (stacked.flatten(len(self.packed) - 1),)


def _take_projections(packed: Tensor) -> tuple[Tensor, ...]:
    """As torch.nn.functional.multi_head_attention_forward takes them."""
    found: Tensor = packed.unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    return found[0], found[1], found[2]


def _take_heads_of_projections(packed: Tensor) -> tuple[Tensor, ...]:
    heads = (t.view(LENGTH, BATCH * HEADS, HEAD).transpose(0, 1) for t in _take_projections(packed))
    return tuple(t.view(_BHLC) for t in heads)


def _take_by_index(packed: Tensor) -> tuple[Tensor, ...]:
    found = packed.permute(2, 0, 3, 1, 4)
    return found[0], found[1], found[2]


def _take_by_split(packed: Tensor) -> tuple[Tensor, ...]:
    parts = packed.split(HEADS * HEAD, dim=2)
    return tuple(t.view(_BLHC).transpose(1, 2) for t in parts)


PACKINGS = (
    Packing(
        "unbind", _BHLC, (BATCH, LENGTH, 3, HEADS, HEAD), lambda t: t.permute(2, 0, 3, 1, 4).unbind(0),
        aten.stack.default, (0, 2, 1, 3), 2,
    ),
    Packing(
        "indices", _BHLC, (BATCH, LENGTH, 3, HEADS, HEAD), _take_by_index,
        aten.select_backward.default, (0, 2, 1, 3), 2,
    ),
    Packing(
        "indices in each head", _BLHC, (BATCH, LENGTH, HEADS, 3, HEAD),
        lambda t: (t[..., 0, :], t[..., 1, :], t[..., 2, :]), aten.select_backward.default, (0, 1, 2, 3), 3,
    ),
    Packing(
        "projections", _LBC, (LENGTH, BATCH, 3, COLUMNS), _take_projections,
        aten.select_backward.default, (0, 1, 2), 2, summed=(0, 1),
    ),
    Packing(
        "projections, copied", _BHLC, (LENGTH, BATCH, 3, HEADS * HEAD), _take_heads_of_projections,
        aten.select_backward.default, (2, 0, 1, 3), 2, has_copies=True,
        summed=(0, 1),
    ),
    Packing(
        "split, copied", _BHLC, (BATCH, LENGTH, 3 * HEADS * HEAD), _take_by_split,
        aten.cat.default, (0, 2, 1, 3), 2,
    ),
)  # fmt: skip
# The gradient alone is one concatenation already.
SPLIT = Packing(
    "split", (BATCH, LENGTH, COLUMNS), (BATCH, LENGTH, 3 * COLUMNS), lambda t: t.split(COLUMNS, dim=2),
    aten.cat.default, (0, 1, 2), 2,
)  # fmt: skip
