"""The cases of the kernel families for benchmarks and tests: a `KernelCase` for each function with a row.

The names of cases begin with the family's word, like the names of its variants. `tools.traffic` counts the
bytes of the cases, `bench.gpu.kernels` measures them on a GPU, tests/bench/test_bench_kernels.py compares
them with PyTorch on the CPU, and tests/unit/kernels/test_cuda.py on a GPU. Incoming gradients of losses are
1, so the kernel that scales precomputed gradients reads only them, and has no row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.case import KernelCase
from bench.models.llama import rotate
from gpipe_fast.kernels.cross_entropy import launch_cross_entropy
from gpipe_fast.kernels.launch import DEFAULT_MULTIPROCESSORS, cdiv, kernels_available
from gpipe_fast.kernels.linear_cross_entropy import choose_chunk_rows, chunked_loss_and_gradients
from gpipe_fast.kernels.losses import reduce_losses, reduction_scale
from gpipe_fast.kernels.mean_loss import launch_loss
from gpipe_fast.kernels.partial_sums import MAX_MATRICES, launch_partial_sums
from gpipe_fast.kernels.rotate_half import launch_rotate_half

IGNORED = -100
HEADS = 16
ROTARY_HEAD_DIM, ROTARY_MAX_LENGTH = 128, 2048
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


def _launched_loss(logits: Tensor, target: Tensor, g: Tensor) -> None:
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
    """Returns the matrices that one program per multiprocessor writes; they are fp32 for every dtype."""
    columns = max(1, elements // (MAX_MATRICES * DEFAULT_MULTIPROCESSORS))
    return [torch.randn(DEFAULT_MULTIPROCESSORS, columns, device=device) for _ in range(MAX_MATRICES)]


def _plain_sums(*matrices: Tensor) -> list[Tensor]:
    return [matrix.sum(0) for matrix in matrices]


def _ours_sums(*matrices: Tensor) -> list[Tensor | None]:
    return _launched_sums(*matrices) if kernels_available(*matrices) else [*_plain_sums(*matrices)]


def _launched_sums(*matrices: Tensor) -> list[Tensor | None]:
    return launch_partial_sums(matrices, [None] * len(matrices))


def rotary_inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns queries and keys of shape (batch, heads, length, head_dim), and tables for all dimensions.

    ``elements`` counts queries and keys.
    """
    positions = max(1, elements // (2 * HEADS * ROTARY_HEAD_DIM))
    length = min(positions, ROTARY_MAX_LENGTH)
    shape = (positions // length, length, HEADS, ROTARY_HEAD_DIM)
    q, k = (torch.randn(shape, dtype=dtype, device=device).transpose(1, 2) for _ in range(2))
    angles = torch.rand(1, length, ROTARY_HEAD_DIM // 2, device=device)
    return [q, k, *(torch.cat([table, table], -1).to(dtype) for table in (angles.cos(), angles.sin()))]


def _rotate_back(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = (g.float() * sin[:, None]).chunk(2, -1)
    return (g.float() * cos[:, None] + torch.cat([second, -first], -1)).to(g.dtype)


def _ours_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dq: Tensor, dk: Tensor
) -> list[Tensor | None]:
    if kernels_available(q):
        return _launched_rotary(q, k, cos, sin, dq, dk)
    return [*rotate(q, k, cos, sin), *(_rotate_back(g, cos, sin) for g in (dq, dk))]


def _launched_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dq: Tensor, dk: Tensor
) -> list[Tensor | None]:
    return [*launch_rotate_half(q, k, cos, sin), *launch_rotate_half(dq, dk, cos, sin, True)]


CASES = [
    KernelCase(
        "cross_entropy mean",
        logits_inputs,
        differentiated=(0,),
        baseline=_loss,
        ours=_ours_loss,
        launched=_launched_loss,
        overwritten=(0,),
    ),
    KernelCase(
        "cross_entropy mean, with the linear layer",
        linear_inputs,
        differentiated=(0, 1),
        baseline=_linear_loss,
        ours=_ours_linear,
        launched=_launched_linear,
        moved=_moved_linear,
        memory_bound=False,
    ),
    KernelCase(
        "mean_loss",
        mean_inputs,
        differentiated=(),
        baseline=_plain_mean,
        ours=_ours_mean,
        launched=_launched_mean,
    ),
    KernelCase(
        "partial sums",
        sums_inputs,
        differentiated=(),
        baseline=_plain_sums,
        ours=_ours_sums,
        launched=_launched_sums,
    ),
    KernelCase(
        "rotary",
        rotary_inputs,
        differentiated=(0, 1),
        baseline=rotate,
        ours=_ours_rotary,
        launched=_launched_rotary,
    ),
]


def all_cases() -> dict[str, KernelCase]:
    """Returns the cases of all families, by name."""
    return {case.name: case for case in CASES}
