"""The name of a layer in messages."""

from __future__ import annotations

from torch import nn


def layer_title(position: int | str, layer: nn.Module) -> str:
    """Returns ``layer 3 (Linear)`` for a layer's position, ``layer 'head' (Linear)`` for its name."""
    return f"layer {position!r} ({type(layer).__name__})"
