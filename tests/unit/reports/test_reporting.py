"""`GPipe.report` and `GPipe.memory`: layers in Python, and arguments that they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.models import features

pytestmark = pytest.mark.filterwarnings("ignore:.*stages idle")


class Busy(nn.Module):
    """A layer that runs in Python, and computes there for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e30:
            return x
        sum(range(100_000))
        return self.linear(x)


@pytest.mark.filterwarnings("ignore:.*runs in Python")
@pytest.mark.parametrize("loss", [True, False])
def test_python_layers_are_found_in_steps_and_in_calls(loss: bool) -> None:
    """Their backwards run them again, and a recording has the time that this takes."""
    pipe = GPipe(nn.Sequential(Busy(), Busy()), [1, 1], chunks=4, checkpoint="always")
    options: dict[str, Any] = {"target": torch.zeros(8, 6), "loss_fn": F.mse_loss} if loss else {}
    report = pipe.report(features(), **options)
    assert [(each.stage, each.layers) for each in report.python] == [
        (0, "layer 0 (Busy)"),
        (1, "layer 1 (Busy)"),
    ]
    assert all(0 <= each.cost <= report.step and each.seconds > 0 for each in report.python)
    assert "layer 1 (Busy)" in str(report).partition("Layers in Python")[2]
    assert report.spread[0] <= report.step <= report.spread[1]
    with pipe.recording() as found:
        pipe(features()).sum().backward()
    assert all((each.recompute > 0) == (each.action.kind.name != "F") for each in found.python)
    assert all(0 <= each.operators <= each.seconds >= each.recompute for each in found.python)


def model() -> GPipe:
    return GPipe(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)), [1, 1], chunks=4)


def test_memory_is_counted_without_running_a_layer() -> None:
    with torch.device("meta"):
        pipe = model()
    report = pipe.memory(torch.empty(8, 6, device="meta"), optimizer=torch.optim.AdamW, device="cuda")
    assert report.devices == ("cuda:0", "cuda:1")
    first, last = report.stages
    assert first is not None
    assert last is not None
    assert first.parameters == 2 * 512  # a weight of 144 bytes, a bias of 24
    assert report.optimizer == (2 * 2 * 512, 2 * 2 * 512)
    assert all(p.grad is None for p in pipe.parameters())
