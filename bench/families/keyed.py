"""The dropout that benchmark cases share: the keyed one, PyTorch's own, and the exact result."""

from __future__ import annotations

import torch
from torch import Tensor

from gpipe_fast.kernels import Draw, reference

P = 0.1


def make_key(device: str) -> Tensor:
    """Returns the key, which is an input of a case."""
    return torch.tensor([1, 2, 3], device=device)


def draw(key: Tensor) -> Draw:
    """Returns the dropout of the first random op of the first layer."""
    return Draw(P, key, 0, 0)


def baseline(x: Tensor) -> Tensor:
    """Computes PyTorch's dropout with the operator that runs on a GPU."""
    return torch.native_dropout(x, P, True)[0]


def exact(x: Tensor, key: Tensor) -> Tensor:
    """Computes dropout with the mask of the keyed op, drawn on the CPU."""
    kept = reference.keep(x.shape, *draw(key.cpu())).to(x.device)
    return x * kept * (1.0 / (1.0 - P))
