"""Streams of pipelined models: results of calls that need several programs, in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*stages idle")]


class Net(nn.Module):
    """Two blocks; ``doubled`` selects what follows them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor, doubled: bool = False) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x).tanh()
        return {"y": 2 * x if doubled else x}


def pipelined() -> Any:
    return GPipe.from_model(Net(), (torch.ones(4, 3),), devices=["cpu"] * 2, chunks=2, balance=[1, 1]).eval()


def test_programs_may_change_between_mini_batches() -> None:
    model = pipelined()
    batches: list[Any] = [
        torch.randn(4, 3),
        {"x": torch.randn(4, 3), "doubled": True},
        (torch.randn(6, 3), True),
        torch.randn(4, 3),
    ]
    found = list(model.stream(batches, depth=3))
    with torch.no_grad():
        expected = [model(batches[0]), model(**batches[1]), model(*batches[2]), model(batches[3])]
    assert [each.keys() for each in found] == [{"y"}] * 4
    assert all(torch.equal(a["y"], b["y"]) for a, b in zip(found, expected, strict=True))


def test_results_before_an_error_come_first() -> None:
    stream = pipelined().stream([torch.ones(4, 3), torch.ones(4, 5)], depth=2)
    assert next(stream)["y"].shape == (4, 3)
    with pytest.raises((RuntimeError, ValueError)):
        next(stream)
