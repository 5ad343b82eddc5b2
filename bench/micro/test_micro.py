"""What parts of gpipe_fast cost: a call, programs, draws, a layer in Python, the engine, first calls."""

from __future__ import annotations

from bench.comparison import Outcome
from bench.micro import draws, engine, execution, first_call, interpreted, signature

COMPARISONS = [
    *signature.COMPARISONS,
    *execution.COMPARISONS,
    *draws.COMPARISONS,
    *interpreted.COMPARISONS,
    *engine.COMPARISONS,
    *first_call.COMPARISONS,
]


def test_micro(measured: Outcome) -> None:
    """Measures a candidate of `COMPARISONS`."""
