"""Smoke tests for every supported version of torch: training steps of small pipelines."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.reference import check_step

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("one_thread")]


def test_one_step_equals_the_plain_loop() -> None:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3)]
    head = [nn.Flatten(), nn.Linear(64, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5)]
    check_step(nn.Sequential(*convolutions, *head), torch.randn(8, 3, 6, 6), chunks=4, balance=[3, 3, 3])


def test_attention_and_tied_weights_equal_the_plain_loop() -> None:
    torch.manual_seed(0)
    layers = [nn.Embedding(11, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)]
    head = nn.Linear(16, 11, bias=False)
    head.weight = layers[0].weight
    check_step(nn.Sequential(*layers, head), torch.randint(0, 11, (6, 5)), chunks=3)
