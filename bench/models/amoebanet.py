"""AmoebaNet-D as a sequence of cells. Each cell takes the outputs of the two cells before it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# The outputs of the previous cell and of the cell before it, both of shape (batch, channels, height, width).
States = tuple[Tensor, Tensor]

# Makes a module from (channels, stride). The module keeps the channels and divides height and width by the
# stride.
Operation = Callable[[int, int], nn.Module]


def _convolution(
    inputs: int, outputs: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
) -> nn.Sequential:
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False), nn.BatchNorm2d(outputs)
    )


def _none(channels: int, stride: int) -> nn.Module:
    assert stride == 1, stride
    return nn.Identity()


def _conv_1x1(channels: int, stride: int) -> nn.Module:
    return _convolution(channels, channels, stride=(stride, stride))


def _conv_3x3(channels: int, stride: int) -> nn.Module:
    """Makes a bottleneck with a quarter of the channels."""
    narrow = channels // 4
    return nn.Sequential(
        *_convolution(channels, narrow),
        *_convolution(narrow, narrow, (3, 3), (stride, stride)),
        *_convolution(narrow, channels),
    )


def _conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    """Makes a bottleneck with a quarter of the channels."""
    narrow = channels // 4
    return nn.Sequential(
        *_convolution(channels, narrow),
        *_convolution(narrow, narrow, (1, 7), (1, stride)),
        *_convolution(narrow, narrow, (7, 1), (stride, 1)),
        *_convolution(narrow, channels),
    )


def _max_pool_2x2(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride)


def _max_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def _avg_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


@dataclass(frozen=True)
class Genotype:
    """The structure of a cell, as found by evolution.

    Attributes:
        sums: pairs of operations whose outputs are added, each with the index of its input state. States 0
            and 1 are the cell's inputs; each sum makes the next state.
        returned: the states that the cell concatenates and returns.
    """

    sums: tuple[tuple[tuple[int, Operation], tuple[int, Operation]], ...]
    returned: tuple[int, ...]


# In arXiv 1802.01548 a normal cell returns states 4, 5 and 6. In TensorFlow's AmoebaNet-D (tensorflow/tpu,
# models/official/amoeba_net) it returns these four, and only then the number of parameters equals table 1 of
# GPipe. torchgpipe's benchmarks return them too, but use 3x3 average pooling where this model has 3x3 maximum
# pooling.
NORMAL = Genotype(
    sums=(
        ((1, _conv_1x1), (1, _max_pool_3x3)),
        ((1, _none), (0, _conv_1x7_7x1)),
        ((0, _conv_1x1), (0, _conv_1x7_7x1)),
        ((2, _max_pool_3x3), (2, _none)),
        ((1, _avg_pool_3x3), (5, _conv_1x1)),
    ),
    returned=(0, 3, 4, 6),
)
REDUCTION = Genotype(
    sums=(
        ((0, _max_pool_2x2), (0, _max_pool_3x3)),
        ((2, _none), (1, _conv_3x3)),
        ((2, _conv_1x7_7x1), (2, _max_pool_3x3)),
        ((3, _none), (1, _max_pool_2x2)),
        ((2, _avg_pool_3x3), (3, _conv_1x1)),
    ),
    returned=(4, 5, 6),
)


class FactorizedReduce(nn.Module):
    """Halves height and width: half of the channels read the even pixels, half the odd ones."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x)
        result: Tensor = self.norm(torch.cat((self.even(x), self.odd(x[:, :, 1:, 1:])), dim=1))
        return result


class Cell(nn.Module):
    """A cell: sums of operations on two states. Returns its output and its first input.

    Args:
        genotype: the operations of the cell.
        channels: channels of each operation.
        before: channels of the two input states.
        stride: 2 if the cell halves height and width, else 1.
        halve_second: whether the second input state is twice as high and wide as the first.
    """

    def __init__(
        self, genotype: Genotype, channels: int, before: tuple[int, int], stride: int, halve_second: bool
    ) -> None:
        super().__init__()
        self.genotype = genotype
        self.reduce_1 = _convolution(before[0], channels)
        self.reduce_2 = (FactorizedReduce if halve_second else _convolution)(before[1], channels)
        self.operations = nn.ModuleList(
            operation(channels, stride if state < 2 else 1)
            for pair in genotype.sums
            for state, operation in pair
        )

    def forward(self, x: Tensor | States) -> States:
        first, second = (x, x) if isinstance(x, Tensor) else x
        states = [self.reduce_1(first), self.reduce_2(second)]
        operations = iter(self.operations)
        for (a, _), (b, _) in self.genotype.sums:
            states.append(next(operations)(states[a]) + next(operations)(states[b]))
        return torch.cat([states[i] for i in self.genotype.returned], dim=1), first


class Classify(nn.Module):
    """The classifier: pools the last cell's output and computes logits."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.pool, self.linear = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, num_classes)

    def forward(self, x: States) -> Tensor:
        result: Tensor = self.linear(self.pool(x[0]).flatten(1))
        return result


def amoebanet_d(num_layers: int, num_filters: int, num_classes: int = 1000) -> nn.Sequential:
    """Builds AmoebaNet-D (L, D) of the GPipe paper (arXiv 1811.06965, table 1; cells: arXiv 1802.01548).

    The model takes images of shape (batch, 3, height, width), with height and width divisible by 32, and
    returns logits of shape (batch, num_classes). With 1000 classes (18, 208) has 81.5 M parameters, (18, 256)
    has 122.5 M.

    Args:
        num_layers: L, the number of normal cells. A third each is at 1/8, 1/16 and 1/32 of height and width.
            The sequence has six more layers.
        num_filters: D, a multiple of 8: four times the channels of the stem. Every reduction doubles the
            channels.
        num_classes: the number of logits.

    Raises:
        ValueError: ``num_layers`` is not divisible by 3, or ``num_filters`` not by 8.
    """
    if num_layers % 3 or num_filters % 8:
        raise ValueError(
            f"num_layers must be divisible by 3 and num_filters by 8, got {num_layers} and {num_filters}"
        )
    channels = num_filters // 4
    model = OrderedDict[str, nn.Module]()
    model["stem1"] = nn.Sequential(
        nn.ReLU(), nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels)
    )
    before, halve_second = (channels, channels), False

    def add(name: str, genotype: Genotype, stride: int) -> None:
        nonlocal before, halve_second
        model[name] = Cell(genotype, channels, before, stride, halve_second)
        before, halve_second = (channels * len(genotype.returned), before[0]), stride == 2

    for name in ("stem2", "stem3", "group1", "reduction1", "group2", "reduction2", "group3"):
        if name.startswith("group"):
            for i in range(num_layers // 3):
                add(f"{name}_cell{i + 1}", NORMAL, 1)
        else:
            channels *= 2
            add(name, REDUCTION, 2)
    model["classify"] = Classify(before[0], num_classes)
    return nn.Sequential(model)
