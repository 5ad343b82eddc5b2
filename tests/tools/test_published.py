"""The simulated tables: costs of layers, and speed-ups against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tools.published import P40, Cost, Published, Setting, costs

WIDTH = 8


def equal_layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))


def rows_of_width(size: int) -> Tensor:
    return torch.empty(size, WIDTH)


def test_an_operator_takes_as_long_as_its_operations_or_its_bytes() -> None:
    with torch.device("meta"):
        (small,) = costs(nn.Sequential(nn.Linear(4, 4, bias=False)), torch.empty(2, 4), P40)
        (large,) = costs(nn.Sequential(nn.Linear(4096, 4096, bias=False)), torch.empty(4096, 4096), P40)
    assert small == Cost(4 * (2 * 4 + 4 * 4 + 2 * 4) / P40.memory, 2 * 2 * 4 * 4, 4 * 2 * 4)
    assert large.seconds == 2 * 4096**3 / P40.flops


@pytest.mark.parametrize(("num_stages", "chunks"), [(1, 2), (2, 4), (4, 16), (8, 1)])
def test_equal_layers_have_the_speed_up_of_the_formula(num_stages: int, chunks: int) -> None:
    settings = [Setting(f"K = {k}", k, chunks, chunks, 1.0, checkpoint="never") for k in (1, num_stages)]
    table = Published("linear", equal_layers, rows_of_width, replace(P40, link=float("inf")), settings)
    one, pipeline = table.speeds()
    assert pipeline / one == pytest.approx(num_stages * chunks / (chunks + num_stages - 1))
