"""Random tensors in random layouts: permuted, expanded, with gaps, with sizes of one and zero."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = (
    *(torch.float32, torch.float32, torch.bfloat16, torch.float64),  # the first twice as often
    *(torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64),
)
_SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0)


def draw_shape(rng: random.Random, dims: int | None = None) -> tuple[int, ...]:
    """Draws a shape of 1 to 4 dimensions, rarely of none; sizes of one and zero are frequent."""
    dims = rng.choice([0, 1, 2, 2, 2, 3, 3, 4, 4]) if dims is None else dims
    return tuple(rng.choice([1, 2, 3, 4, 5, 8, rng.choice([0, 1, 17])]) for _ in range(dims))


def draw_tensor(rng: random.Random, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Draws a tensor's values and its layout."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    if dtype.is_floating_point or dtype.is_complex:
        values = torch.randn(shape, generator=generator, dtype=dtype)
        if values.numel() and rng.random() < 0.3:
            values.view(-1)[rng.randrange(values.numel())] = rng.choice(_SPECIAL)
    else:
        values = torch.randint(0 if dtype is torch.uint8 else -3, 4, shape, generator=generator).to(dtype)
    return in_another_layout(rng, values)


def in_another_layout(rng: random.Random, tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor in a random layout, or one of its slices, expanded to its shape."""
    kinds = ["contiguous", "permuted", "permuted", "gaps", "permuted with gaps", "expanded", "channels_last"]
    kind = rng.choice(kinds)
    shape, order = tensor.shape, list(range(tensor.dim()))
    if kind == "expanded" and tensor.numel():
        dims = rng.sample(order, rng.randint(0, len(order)))
        for dim in dims:
            tensor = tensor.narrow(dim, 0, 1)
        return tensor.clone().expand(shape)
    if kind == "channels_last":
        order = [*order[:1], *order[2:], *order[1:2]]
    elif kind.startswith("permuted"):
        rng.shuffle(order)
    gaps = [rng.choice([0, 0, 1, 2]) if "gaps" in kind else 0 for _ in order]
    memory = torch.zeros([shape[d] + gap for d, gap in zip(order, gaps, strict=True)], dtype=tensor.dtype)
    inside = memory[tuple(slice(gap, gap + shape[d]) for d, gap in zip(order, gaps, strict=True))]
    return inside.permute([order.index(d) for d in range(len(order))]).copy_(tensor)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Returns whether tensors have equal shapes, dtypes and bits; NaNs are compared, too."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    bits = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(*bits)
