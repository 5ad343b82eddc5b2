"""Benchmark cases of softmax cross-entropy with the vocabulary of a language model.

There is one case for logits and one with the last linear layer. Incoming gradients are 1, so the kernel that
scales precomputed gradients reads only them, and has no row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu import liger
from bench.gpu.case import KernelCase
from gpipe_fast.kernels.cross_entropy import launch_cross_entropy
from gpipe_fast.kernels.launch import cdiv
from gpipe_fast.kernels.linear_cross_entropy import choose_chunk_rows, chunked_loss_and_gradients
from gpipe_fast.kernels.losses import reduce_losses, reduction_scale

CLASSES = 32000
FEATURES = 1024
# Inputs with few elements have fewer classes, so that the mean is always over at least this many rows.
MIN_ROWS = 32
IGNORED = -100


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


def _in_fp32(loss: Tensor) -> Tensor:
    """Converts the loss to fp32, the dtype of our loss; leaves float64 unchanged."""
    return loss.to(torch.promote_types(loss.dtype, torch.float32))


def _plain(logits: Tensor, target: Tensor) -> Tensor:
    return _in_fp32(F.cross_entropy(logits, target))


def _plain_linear(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _plain(F.linear(x, weight), target)


def _ours(logits: Tensor, target: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
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


def _launched(logits: Tensor, target: Tensor, g: Tensor) -> None:
    losses = launch_cross_entropy(
        logits, logits, target, reduction_scale(target, IGNORED, "mean"), IGNORED, 0.0
    )
    reduce_losses(losses, target, IGNORED, "mean")


def _launched_linear(x: Tensor, weight: Tensor, target: Tensor, g: Tensor) -> None:
    chunk_rows = choose_chunk_rows(target.numel(), *weight.shape)
    chunked_loss_and_gradients(x, weight, target, None, IGNORED, 0.0, "mean", chunk_rows, (True, True, False))


def _moved_linear(inputs: Sequence[Tensor], _: Sequence[Tensor]) -> int:
    """Computes the bytes moved on a GPU; meta tensors take the CPU's path, which casts half precision."""
    x, weight, target = inputs
    rows, size, weights = target.numel(), x.itemsize, weight.numel()
    chunks = cdiv(rows, choose_chunk_rows(rows, *weight.shape))
    # Logits: written by the product, read and overwritten by the loss, read by two products. x: read by two
    # products; its gradient is written.
    moved = (5 * rows * weight.shape[0] + 3 * x.numel()) * size
    # Each chunk reads the weight twice. The first chunk writes the weight's gradient, the others add to it.
    moved += chunks * 2 * size * weights
    if chunks == 1:
        return moved + size * weights
    # Several chunks accumulate in fp32; half precision adds a cast.
    moved += (2 * chunks - 1) * 4 * weights
    return moved if size == 4 else moved + (4 + size) * weights


MEAN = KernelCase(
    "cross_entropy mean",
    logits_inputs,
    differentiated=(0,),
    baseline=_plain,
    ours=_ours,
    launched=_launched,
    overwritten=(0,),
    liger=lambda logits, target: _in_fp32(liger.cross_entropy(logits, target)),
)
LINEAR = KernelCase(
    "cross_entropy mean, with the linear layer",
    linear_inputs,
    differentiated=(0, 1),
    baseline=_plain_linear,
    ours=_ours_linear,
    launched=_launched_linear,
    liger=lambda x, weight, target: _in_fp32(liger.linear_cross_entropy(x, weight, target)),
    moved=_moved_linear,
    memory_bound=False,
)


CASES = [MEAN, LINEAR]
