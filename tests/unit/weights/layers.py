"""Layers to load, on the meta device and with data, and a comparison of a step with the plain loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe


class Rotation(nn.Module):
    """Has a buffer and a plain tensor that are not in the state dict."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("angles", torch.empty(width), persistent=False)
        self.offset = torch.empty(width)
        self.reset_tables()

    def reset_tables(self) -> None:
        self.angles.copy_(torch.arange(8.0) / 8)
        self.offset = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.angles + self.offset


def build(*, rotation: bool = False) -> nn.Sequential:
    """Returns layers with a tied weight, a buffer, and parameters of three kinds."""
    torch.manual_seed(0)
    first, last = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
    last.weight = first.weight
    middle = Rotation() if rotation else nn.Linear(8, 8)
    return nn.Sequential(first, nn.BatchNorm1d(8), middle, nn.GELU(), last)


def on_meta(**options: Any) -> GPipe:
    with torch.device("meta"):
        return GPipe(build(**options), [2, 3], chunks=2)


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 128).view(16, 8)


def assert_loaded(model: GPipe, plain: nn.Sequential) -> None:
    """Checks a step against the plain loop."""
    for (name, tensor), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(tensor, expected), name
    assert all(map(torch.equal, model.buffers(), plain.buffers()))
    x = inputs()
    y, expected = model(x), torch.cat([plain(part) for part in x.chunk(2)])
    assert torch.equal(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        if name == "0.weight":  # its gradients of two stages are added last
            torch.testing.assert_close(ours.grad, theirs.grad)
        else:
            assert torch.equal(ours.grad, theirs.grad), name
