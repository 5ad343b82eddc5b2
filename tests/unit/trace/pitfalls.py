"""A layer and a batch for the pitfall tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def linear(seed: int = 0, width: int = 6) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(width, width)


def batch(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(8, *(shape or (6,)), generator=torch.Generator().manual_seed(seed))
