"""Which layers a backward must not run again, because a second run may have other effects."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

_unrepeatable: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def mark_unrepeatable(layer: nn.Module) -> None:
    """Records that a second run of a layer may differ from the first."""
    _unrepeatable.add(layer)


def are_repeatable(layers: Iterable[nn.Module]) -> bool:
    """Returns whether, as far as is known, a backward may run these layers again (recompute)."""
    return not any(layer in _unrepeatable for layer in layers)
