"""Layers that read NumPy arrays in attributes equal the plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.reference import loop_step, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")


class Scaled(nn.Module):
    def __init__(self, scale: np.ndarray) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * float(self.scale.sum())
        return y


@pytest.mark.parametrize("scale", [np.array(2.0), np.array([2.0]), np.full((2, 1), 2.0)], ids=np.shape)
def test_an_array_of_any_number_of_dimensions_may_be_read_and_changed(scale: np.ndarray) -> None:
    layers, x = nn.Sequential(nn.Linear(6, 6), Scaled(scale)), torch.randn(8, 6)
    pipe = GPipe(layers, [1, 1], chunks=4)
    for _ in range(2):
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 4)) == []
        scale[...] *= 2
