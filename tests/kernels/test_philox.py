"""Thresholds by which kernels keep random words."""

from __future__ import annotations

import pytest

from gpipe_fast.kernels.philox import threshold


@pytest.mark.parametrize(
    ("p", "last", "scale"),
    [(0.0, -1, 1.0), (0.5, 2**31 - 1, 2.0), (0.25, 3 * 2**30 - 1 - 2**32, 4 / 3), (1.0, 0, 0.0)],
)
def test_what_kernels_take(p: float, last: int, scale: float) -> None:
    assert threshold(p) == (last, scale)


def test_the_fewest_words_that_are_kept() -> None:
    assert threshold(1 - 2.0**-32) == (0, 2.0**32)
    assert threshold(1 - 2.0**-33) == (0, 2.0**33)
    assert threshold(1 - 2.0**-34) == (0, 0.0)
