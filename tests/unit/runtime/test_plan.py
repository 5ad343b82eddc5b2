"""Plans: their schedule, what is known of their outputs, and whether they draw random numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.internals import plan_of
from tests.untraceable import without_warnings


def pipeline(*layers: nn.Module, chunks: int = 4) -> GPipe:
    return GPipe(nn.Sequential(*layers), [1] * len(layers), chunks=chunks, checkpoint="never")


class Branch(nn.Module):
    """A layer that runs in Python."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 1e9 else -x


@pytest.mark.parametrize(
    ("layer", "draws"),
    [(nn.Dropout(0.5), True), (nn.Dropout(0.0), False), (nn.ReLU(), False), (Branch(), None)],
)
def test_random_operators_are_known_unless_a_layer_runs_in_python(
    layer: nn.Module, draws: bool | None
) -> None:
    with without_warnings():
        assert plan_of(pipeline(nn.Linear(6, 6), layer), torch.randn(8, 6)).draws is draws
