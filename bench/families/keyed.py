"""The draw that benchmarks of dropout share: what PyTorch draws, and what is compared."""

from __future__ import annotations

import torch
from torch import Tensor

from gpipe_fast.kernels import Draw, reference

P = 0.1


def key_on(device: str) -> Tensor:
    """The key, an input of a case."""
    return torch.tensor([1, 2, 3], device=device)


def draw(key: Tensor) -> Draw:
    """Of the layer's first random op."""
    return Draw(P, key, 0, 0)


def plain(x: Tensor) -> Tensor:
    """PyTorch's own dropout, as it runs on a GPU."""
    return torch.native_dropout(x, P, True)[0]


def exact(x: Tensor, key: Tensor) -> Tensor:
    """With the mask of the keyed op, drawn on the CPU."""
    kept = reference.keep(x.shape, *draw(key.cpu())).to(x.device)
    return x * kept * (1.0 / (1.0 - P))
