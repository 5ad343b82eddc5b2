"""ResNet as a sequence that can be partitioned anywhere, because its shortcuts are skip connections."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence
from typing import cast

from torch import Tensor, nn

from bench.models.flatten import flatten
from gpipe_fast.skip import Namespace, Skippable, pop, skippable, stash

EXPANSION = 4


@skippable(stash=["identity"])
class Identity(nn.Module):
    """Stashes its input for the end of the bottleneck, and returns it."""

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("identity", x)
        return x


@skippable(pop=["identity"])
class Residual(nn.Module):
    """Adds the input of the bottleneck.

    Args:
        downsample: a module that converts the bottleneck's input to its output shape, or None if they are
            equal.
    """

    def __init__(self, downsample: nn.Module | None) -> None:
        super().__init__()
        self.downsample = downsample

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        identity = yield pop("identity")
        return x + (identity if self.downsample is None else self.downsample(identity))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def bottleneck(inputs: int, width: int, stride: int) -> nn.Sequential:
    """Returns 1x1, 3x3 and 1x1 convolutions with a shortcut; the output has ``4 * width`` channels.

    Args:
        inputs: channels of the input.
        width: channels of the first two convolutions.
        stride: the stride of the second convolution.
    """
    outputs, skip = EXPANSION * width, Namespace()
    downsample: nn.Module | None = None
    if stride != 1 or inputs != outputs:
        downsample = nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
    return nn.Sequential(
        OrderedDict(
            identity=cast(Skippable, Identity()).isolate(skip),
            conv1=_convolution(inputs, width, 1),
            bn1=nn.BatchNorm2d(width),
            relu1=nn.ReLU(),
            conv2=_convolution(width, width, 3, stride),
            bn2=nn.BatchNorm2d(width),
            relu2=nn.ReLU(),
            conv3=_convolution(width, outputs, 1),
            bn3=nn.BatchNorm2d(outputs),
            residual=cast(Skippable, Residual(downsample)).isolate(skip),
            relu3=nn.ReLU(),
        )
    )


def resnet(blocks: Sequence[int], num_classes: int = 1000, width: int = 64) -> nn.Sequential:
    """Builds a ResNet of bottlenecks (arXiv 1512.03385), with strides in 3x3 convolutions as in torchvision.

    The model takes images of shape (batch, 3, height, width) and returns logits of shape (batch,
    num_classes). Parameters and buffers equal torchvision's, in the same order.

    Args:
        blocks: the number of bottlenecks of each group. Every group has twice the channels of the one before.
        num_classes: the number of logits.
        width: channels of the stem.
    """
    model = OrderedDict[str, nn.Module](
        conv1=nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        bn1=nn.BatchNorm2d(width),
        relu=nn.ReLU(),
        maxpool=nn.MaxPool2d(3, stride=2, padding=1),
    )
    channels = width
    for group, count in enumerate(blocks):
        for index in range(count):
            stride = 2 if group and not index else 1
            model[f"layer{group + 1}_{index}"] = bottleneck(channels, width << group, stride)
            channels = EXPANSION * width << group
    model |= {
        "avgpool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
        "fc": nn.Linear(channels, num_classes),
    }
    return flatten(nn.Sequential(model))


def resnet101(num_classes: int = 1000) -> nn.Sequential:
    """Builds ResNet-101 as 370 layers. With 1000 classes it has 44,549,160 parameters."""
    return resnet((3, 4, 23, 3), num_classes)
