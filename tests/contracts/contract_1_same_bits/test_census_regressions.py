"""Small models whose results once differed from the plain loop's; the torchvision census found them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.reference import check_step

pytestmark = pytest.mark.usefixtures("one_thread")

MIDDLE_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm2d(48),
    "group norm": lambda: nn.GroupNorm(4, 48),
    "instance norm after padding": lambda: nn.Sequential(nn.ZeroPad2d(1), nn.InstanceNorm2d(48)),
    "average pool": lambda: nn.AvgPool2d(3, 1, 1),
    "upsampling": lambda: nn.Upsample(scale_factor=2),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("name", MIDDLE_LAYERS)
def test_a_channels_last_model_of_single_pixels_equals_the_plain_loop(
    name: str, activation: type[nn.Module]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 48, 1, bias=False), MIDDLE_LAYERS[name](), activation(), nn.Flatten())
    model.to(memory_format=torch.channels_last)
    x = torch.randn(6, 64, 1, 1).to(memory_format=torch.channels_last)
    check_step(model, x, chunks=3)
