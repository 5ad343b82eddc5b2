"""The joint export: what PyTorch keeps between operators of eager mode, and a trace must not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.reference import loop_step, pipeline_step, unequal


class LinearTwiceUnderAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(self.linear(x).relu()).float()


@pytest.mark.usefixtures("one_thread")
def test_autocast_equals_the_plain_loop_without_the_weight_cache() -> None:
    x = torch.linspace(-1, 1, 48).view(8, 6)
    ours = pipeline_step(GPipe(nn.Sequential(LinearTwiceUnderAutocast()), [1], chunks=4), x, 0.0)
    torch.set_autocast_cache_enabled(False)
    try:
        expected = loop_step(nn.Sequential(LinearTwiceUnderAutocast()), x, 4)
    finally:
        torch.set_autocast_cache_enabled(True)
    assert unequal(ours, expected) == []
