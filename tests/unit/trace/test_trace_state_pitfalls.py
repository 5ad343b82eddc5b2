"""A pitfall of tracing that loses state: buffers that a layer updates and reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.reference import check_step
from tests.unit.trace.pitfalls import batch, linear

pytestmark = pytest.mark.usefixtures("one_thread")


class Average(nn.Module):
    """Scales by a moving average that it updates. Its backward depends on the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.abs().mean(), alpha=0.1)
        return x * self.average.clone()


STATEFUL = {
    "average": lambda: nn.Sequential(linear(), Average(), linear(1)),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(linear()), nn.Tanh()),
    "batch norm": lambda: nn.Sequential(linear(), nn.BatchNorm1d(6), nn.Tanh()),
}


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("chunks", [1, 4])
def test_recomputing_a_layer_that_updates_a_buffer_it_reads_equals_the_plain_loop(
    name: str, chunks: int
) -> None:
    check_step(STATEFUL[name](), batch(), chunks)
