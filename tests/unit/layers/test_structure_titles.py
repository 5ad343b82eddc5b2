"""Layer titles, by which messages name layers."""

from __future__ import annotations

from torch import nn

from gpipe_fast.layers.structure import layer_title


def test_a_title_has_the_position_or_name_and_the_class() -> None:
    assert layer_title(3, nn.Linear(1, 1)) == "layer 3 (Linear)"
    assert layer_title("head", nn.Linear(1, 1)) == "layer 'head' (Linear)"
    assert layer_title("4.norm", nn.BatchNorm1d(1)) == "layer '4.norm' (BatchNorm1d)"
