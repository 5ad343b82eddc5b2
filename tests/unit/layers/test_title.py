"""One title of a layer, in every message that names one."""

from __future__ import annotations

from torch import nn

from gpipe_fast.layers.title import title


def test_a_position_and_a_name() -> None:
    assert title(3, nn.Linear(1, 1)) == "layer 3 (Linear)"
    assert title("head", nn.Linear(1, 1)) == "layer 'head' (Linear)"
    assert title("4.norm", nn.BatchNorm1d(1)) == "layer '4.norm' (BatchNorm1d)"
