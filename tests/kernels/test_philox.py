"""Dropout thresholds: the largest random word for which kernels keep an element."""

from __future__ import annotations

import pytest

from gpipe_fast.kernels.philox import keep_threshold


@pytest.mark.parametrize(
    ("p", "last", "scale"),
    [(0.0, -1, 1.0), (0.5, 2**31 - 1, 2.0), (0.25, 3 * 2**30 - 1 - 2**32, 4 / 3), (1.0, 0, 0.0)],
)
def test_threshold_returns_the_last_kept_word_and_the_scale(p: float, last: int, scale: float) -> None:
    assert keep_threshold(p) == (last, scale)


def test_threshold_rounds_the_number_of_kept_words() -> None:
    assert keep_threshold(1 - 2.0**-32) == (0, 2.0**32)
    assert keep_threshold(1 - 2.0**-33) == (0, 2.0**33)
    assert keep_threshold(1 - 2.0**-34) == (0, 0.0)
