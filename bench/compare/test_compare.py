"""Steps beside torchgpipe, torch.distributed.pipelining, plain PyTorch and torch.compile."""

from __future__ import annotations

from bench.compare import distributed, frontier, overhead, step, tensor_parallel
from bench.comparison import Outcome

COMPARISONS = [
    *overhead.COMPARISONS,
    *step.COMPARISONS,
    *frontier.COMPARISONS,
    *distributed.COMPARISONS,
    *tensor_parallel.COMPARISONS,
]


def test_compare(measured: Outcome) -> None:
    """Measures a candidate of `COMPARISONS`."""
