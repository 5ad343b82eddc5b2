"""Steps of the papers' models on a GPU, all stages on one device."""

from __future__ import annotations

from functools import partial

import torch

from bench.comparison import Outcome, Series
from bench.gpu.cuda import outcomes
from bench.gpu.subjects import ROWS

# Without a GPU, there is nothing to compare.
COMPARISONS = [
    Series(row.title, row.full.candidates(), partial(outcomes, row), sampled=True)
    for row in ROWS.values()
    if torch.cuda.is_available()
]


def test_gpu(measured: Outcome) -> None:
    """Measures a candidate of `COMPARISONS`."""
