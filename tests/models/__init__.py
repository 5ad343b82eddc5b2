"""Small models for tests of whole pipelines, with their mini-batches and balances."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from bench.models.gpt import Block

Model, Batch = Callable[[], nn.Sequential], Callable[[int], Tensor]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def gpt() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 16), Block(16, 2), nn.Dropout(0.1), Block(16, 2), nn.Linear(16, 11))


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def batch_normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 4))


def noisy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Dropout(0.2), nn.Linear(6, 8), nn.Dropout(0.5), nn.GELU(), nn.AlphaDropout(0.1), nn.Linear(8, 4)
    )


def spectral() -> nn.Sequential:
    """Returns a model whose backward depends on buffers that change with every micro-batch."""
    torch.manual_seed(0)
    return nn.Sequential(
        spectral_norm(nn.Linear(6, 8)), nn.Tanh(), spectral_norm(nn.Linear(8, 8)), nn.GELU(), nn.Linear(8, 4)
    )


def features(batch: int = 8) -> Tensor:
    return torch.randn(batch, 6, generator=torch.Generator().manual_seed(1))


def tokens(batch: int = 8) -> Tensor:
    return torch.randint(0, 11, (batch, 5), generator=torch.Generator().manual_seed(1))


def images(batch: int = 8) -> Tensor:
    return torch.randn(batch, 3, 6, 6, generator=torch.Generator().manual_seed(1))


MODELS: dict[str, tuple[Model, Batch]] = {
    "mlp": (mlp, features),
    "gpt": (gpt, tokens),
    "convolutions": (convolutions, images),
    "dropout": (noisy, features),
    "spectral norm": (spectral, features),
}
every_model = pytest.mark.parametrize(("make", "batch"), MODELS.values(), ids=MODELS.keys())


def uneven_balance(num_layers: int, num_stages: int) -> list[int]:
    """Returns an uneven balance: one layer in every stage but the last."""
    sizes = [1] * num_stages
    sizes[-1] += num_layers - num_stages
    return sizes
