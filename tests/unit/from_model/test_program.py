"""Programs of recorded calls: their layers, and how the outputs of micro-batches are put together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.from_model.program import Program

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*stages idle")]
X = torch.arange(12.0).view(4, 3)


class Net(nn.Module):
    """Two blocks and a parameter between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, last = self.blocks
        y = last(first(x) * self.scale)
        return y, y.sum(1)


def program() -> tuple[nn.Module, Program, Any]:
    plain = Net()
    model: Any = GPipe.from_model(plain, (X,), devices=["cpu"] * 2, chunks=2, balance=[1, 1])
    with torch.no_grad():
        found, given = model._calls.begin(plain, (X,), {})
        model._calls.end(found)
    return plain, found, given


def test_every_tensor_of_the_model_is_in_one_layer() -> None:
    plain, found, _ = program()
    assert len(found.layers) == len(found.pipeline)
    assert found.split == {0}
    assert [output.ref for output in found.outputs] == list(found.flow.result.refs())
    found.take()
    owned = [id(p) for layer in found.layers for p in layer.parameters()]
    found.give_back()
    assert sorted(owned) == sorted(id(p) for p in plain.parameters())


def test_outputs_of_micro_batches_are_put_together() -> None:
    plain, found, given = program()
    with torch.no_grad():
        y, total = found(given)
        expected = plain(X)
    assert torch.equal(y, torch.cat([plain(part)[0] for part in X.chunk(2)]))
    torch.testing.assert_close(total, expected[1])
