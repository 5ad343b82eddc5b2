"""U-Net in the sizes of the torchgpipe paper, with skip connections between encoder and decoder layers."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Generator, Iterable
from typing import cast

import torch
from torch import Tensor, nn

from bench.models.flatten import flatten
from gpipe_fast.skip import Namespace, Skippable, pop, skippable, stash


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stashes its input for the decoder, and returns it."""

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class PopCat(nn.Module):
    """Concatenates its input and the encoder's channels."""

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        return torch.cat((x, skip), dim=1)


def _convolution(inputs: int, outputs: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            dropout=nn.Dropout2d(dropout),
            norm=nn.InstanceNorm2d(outputs),
            relu=nn.LeakyReLU(),
        )
    )


def _convolutions(channels: Iterable[int], dropout: float) -> nn.Sequential:
    """Returns a sequence of convolutions, each from one number of channels to the next."""
    pairs = enumerate(itertools.pairwise(channels))
    return nn.Sequential(OrderedDict((f"{i + 1}", _convolution(*pair, dropout)) for i, pair in pairs))


def unet(
    num_convs: int,
    base_channels: int,
    depth: int = 5,
    in_channels: int = 3,
    out_channels: int = 1,
    dropout: float = 0.1,
) -> nn.Sequential:
    """Builds the simplified U-Net (B, C) of torchgpipe (arXiv 2004.09910), after arXiv 1505.04597.

    For three levels, encoder and decoder have convolutions with these channels::

        3  C  C .. C  ----------------------------------  2C  C/2  C/2 .. C/2  out_channels
            C  2C  2C .. 2C  ----------------------  4C  C  C .. C
                2C  4C  4C .. 4C  ----------  8C  2C  2C .. 2C
                               4C  8C .. 8C  4C

    The model takes images of shape (batch, in_channels, height, width), with height and width divisible by
    2**depth, and returns logits of shape (batch, out_channels, height, width). (6, 72) has 362.2 M
    parameters, (5, 64) has 232.7 M.

    Args:
        num_convs: B, the number of convolutions of each level; at least 1.
        base_channels: C, an even number of channels. Every lower level has twice as many.
        depth: the number of levels, and of skip connections.
        in_channels: channels of the images.
        out_channels: channels of the logits.
        dropout: the fraction of channels that dropout after each convolution zeroes in training.
    """
    widths = [base_channels << level for level in range(depth)]
    skips = [Namespace() for _ in widths]
    model = OrderedDict[str, nn.Module]()
    for level, (before, width) in enumerate(zip([in_channels, *widths[:-1]], widths, strict=True)):
        model[f"encoder{level + 1}"] = nn.Sequential(
            OrderedDict(
                conv=_convolutions([before] + num_convs * [width], dropout),
                stash=cast(Skippable, Stash()).isolate(skips[level]),
                down=nn.MaxPool2d(2),
            )
        )
    bottom = [widths[-1], *(num_convs - 1) * [2 * widths[-1]], widths[-1]]
    model["bottleneck"] = _convolutions(bottom, dropout)
    for level, width in reversed([*enumerate(widths)]):
        model[f"decoder{level + 1}"] = nn.Sequential(
            OrderedDict(
                up=nn.Upsample(scale_factor=2),
                cat=cast(Skippable, PopCat()).isolate(skips[level]),
                conv=_convolutions([2 * width] + num_convs * [width // 2], dropout),
            )
        )
    model["segment"] = nn.Conv2d(base_channels // 2, out_channels, 1, bias=False)
    return flatten(nn.Sequential(model))
