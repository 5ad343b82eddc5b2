"""Steps of the papers' models on a GPU, all stages on one device."""

from __future__ import annotations

import torch

from bench.comparison import Outcome
from bench.gpu.subjects import ROWS, comparison

# Without a GPU, there is nothing to compare.
COMPARISONS = [
    comparison(row.title, row.full, "cuda:0", row.small) for row in ROWS.values() if torch.cuda.is_available()
]


def test_gpu(measured: Outcome) -> None:
    """Measures a candidate of `COMPARISONS`."""
