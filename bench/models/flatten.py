"""Flattening of nested sequences, so that a pipeline can be partitioned anywhere."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from torch import nn


def flatten(model: nn.Sequential) -> nn.Sequential:
    """Returns the layers of nested sequences as one sequence. Joins their names with underscores."""
    return nn.Sequential(OrderedDict(_layers(model)))


def _layers(model: nn.Sequential, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, layer in model.named_children():
        if type(layer) is nn.Sequential:
            yield from _layers(layer, f"{prefix}{name}_")
        else:
            yield prefix + name, layer
