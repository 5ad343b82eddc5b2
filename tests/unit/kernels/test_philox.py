"""Dropout thresholds: the largest random word for which kernels keep an element."""

from __future__ import annotations

import pytest

from gpipe_fast.kernels.philox import last_kept_word


@pytest.mark.parametrize(
    ("keep", "last"), [(1.0, -1), (0.5, 2**31 - 1), (0.75, 3 * 2**30 - 1 - 2**32), (0.0, 0)]
)
def test_threshold_is_the_last_kept_word(keep: float, last: int) -> None:
    assert last_kept_word(keep) == last


def test_threshold_rounds_the_number_of_kept_words() -> None:
    assert last_kept_word(2.0**-31 + 2.0**-33) == 2
    assert last_kept_word(2.0**-31 + 2.0**-34) == 1
