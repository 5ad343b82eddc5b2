"""The cases of the kernel families: a `KernelCase` for each function, compared with PyTorch's operators.

The names of cases begin with the family's word, like the names of its variants (tools/variants.py). Incoming
gradients of losses are 1, so the kernel that scales precomputed gradients reads only them, and has no case
of its own. All compared results have the same form: the outputs of a function, then the gradients of its
differentiated inputs. This is the backward of a recomputed segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.kernels.launch import DEFAULT_MULTIPROCESSORS, kernels_available
from gpipe_fast.kernels.linear_cross_entropy import choose_chunk_rows
from gpipe_fast.kernels.mean_loss import launch_loss
from gpipe_fast.kernels.partial_sums import launch_partial_sums
from tests.unit.kernels.accuracy import error_ratio, to_float64

Function = Callable[..., Any]
IGNORED = -100
CLASSES = 32000
FEATURES = 1024
# Inputs with few elements have fewer classes, so that the mean is always over at least this many rows.
MIN_ROWS = 32


def logits_inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns logits and targets."""
    cols = min(CLASSES, max(1, elements // MIN_ROWS))
    rows = max(1, elements // cols)
    target = torch.randint(cols, (rows,), device=device)
    return [torch.randn(rows, cols, dtype=dtype, device=device), target]


def linear_inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns the input of the last layer, its weight, and targets. ``elements`` counts the logits."""
    logits, target = logits_inputs(elements, dtype, "meta")
    rows, cols = logits.shape
    target = torch.randint(cols, (rows,), device=device)
    weight = torch.randn(cols, FEATURES, dtype=dtype, device=device) * FEATURES**-0.5
    return [torch.randn(rows, FEATURES, dtype=dtype, device=device), weight, target]


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    """Returns the loss in fp32, the dtype of our loss; float64 stays."""
    loss = F.cross_entropy(logits, target)
    return loss.to(torch.promote_types(loss.dtype, torch.float32))


def _linear_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _loss(F.linear(x, weight), target)


def _ours_loss(logits: Tensor, target: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Runs the ops of `cross_entropy` and its backward, in a form that compiles to one graph."""
    loss = torch.ops.gpipe_fast.cross_entropy_(logits, target, IGNORED, 0.0, "mean")
    torch.ops.gpipe_fast.scale_precomputed_gradient_(logits, g)
    return loss, logits


def _ours_linear(x: Tensor, weight: Tensor, target: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    chunk_rows = choose_chunk_rows(target.numel(), *weight.shape)
    options = (IGNORED, 0.0, "mean", chunk_rows, (True, True, False))
    loss, *made, _ = torch.ops.gpipe_fast.linear_cross_entropy(x, weight, target, None, *options)
    for gradient in made:
        torch.ops.gpipe_fast.scale_precomputed_gradient_(gradient, g)
    return loss, *made


def mean_inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns fp32 losses of rows, and their targets, some of which are ignored."""
    losses, target = torch.rand(elements, device=device), torch.randint(100, (elements,), device=device)
    ignored = torch.arange(elements, device=device) % 8 == 0
    return [losses.masked_fill(ignored, 0.0), target.masked_fill(ignored, IGNORED)]


def _plain_mean(losses: Tensor, target: Tensor) -> Tensor:
    return losses.sum() / (target != IGNORED).sum()


def _ours_mean(losses: Tensor, target: Tensor) -> Tensor:
    return (_launched_mean if kernels_available(losses) else _plain_mean)(losses, target)


def _launched_mean(losses: Tensor, target: Tensor) -> Tensor:
    return launch_loss(losses, target, IGNORED, mean=True, dtype=losses.dtype)


def sums_inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns the matrix that one program per multiprocessor writes; it is fp32 for every dtype."""
    columns = max(1, elements // DEFAULT_MULTIPROCESSORS)
    return [torch.randn(DEFAULT_MULTIPROCESSORS, columns, device=device)]


def _plain_sums(matrix: Tensor) -> Tensor:
    return matrix.sum(0)


def _ours_sums(matrix: Tensor) -> Tensor:
    return (_launched_sums if kernels_available(matrix) else _plain_sums)(matrix)


def _launched_sums(matrix: Tensor) -> Tensor:
    return launch_partial_sums(matrix, torch.float32)


@dataclass(frozen=True)
class KernelCase:
    """One function of a kernel family.

    Attributes:
        inputs: makes input tensors from the approximate number of elements, a dtype, and a device.
        differentiated: the indices of the inputs with gradients; empty if the function is not differentiable.
        baseline: the function in the PyTorch operators that run on a GPU.
        ours: computes outputs and gradients from inputs and output gradients, which it may overwrite.
    """

    inputs: Callable[[int, torch.dtype, str], list[Tensor]]
    differentiated: Sequence[int]
    baseline: Function
    ours: Function

    def gradients(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns random gradients of the outputs; the gradient of a scalar output (a loss) is 1."""
        if not self.differentiated:
            return []
        outputs = _as_list(self.baseline(*(t.to("meta") for t in inputs)))
        random = (torch.randn if out.dim() else torch.ones for out in outputs)
        return [
            make(out.shape, dtype=out.dtype, device=inputs[0].device)
            for make, out in zip(random, outputs, strict=True)
        ]

    def unfused(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Returns outputs and gradients by autograd."""
        leaves = [t.detach().clone().requires_grad_(i in self.differentiated) for i, t in enumerate(inputs)]
        outputs = _as_list(self.baseline(*leaves))
        found: Sequence[Tensor] = ()
        if self.differentiated:
            found = torch.autograd.grad(outputs, [leaves[i] for i in self.differentiated], gradients)
        return [t.detach() for t in (*outputs, *found)]

    def fused(
        self, inputs: Sequence[Tensor], gradients: Sequence[Tensor], ours: Function | None = None
    ) -> list[Tensor | None]:
        """Returns outputs and gradients by our kernels, or by another form of them, from copies."""
        return _as_list((ours or self.ours)(*(t.clone() for t in (*inputs, *gradients))))

    def check(self, elements: int, dtype: torch.dtype, device: str) -> None:
        """Asserts that the errors against float64 are at most twice PyTorch's, or one rounding."""
        inputs = self.inputs(elements, dtype, device)
        gradients = self.gradients(inputs)
        given, incoming = ([t for t in to_float64(each) if t is not None] for each in (inputs, gradients))
        exact = self.unfused(given, incoming)
        shares = error_ratio(self.fused(inputs, gradients), self.unfused(inputs, gradients), exact)
        assert max(shares, default=0.0) <= 1, shares


def _as_list(found: Any) -> list[Any]:
    return [found] if isinstance(found, Tensor) else list(found)


CASES = {
    "cross_entropy mean": KernelCase(logits_inputs, (0,), _loss, _ours_loss),
    "cross_entropy mean, with the linear layer": KernelCase(
        linear_inputs, (0, 1), _linear_loss, _ours_linear
    ),
    "mean_loss": KernelCase(mean_inputs, (), _plain_mean, _ours_mean),
    "partial sums": KernelCase(sums_inputs, (), _plain_sums, _ours_sums),
}
