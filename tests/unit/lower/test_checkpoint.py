"""Checkpoint policies: which micro-batches recompute."""

from __future__ import annotations

import pytest

from gpipe_fast.lower.checkpoint import Checkpoint, check_share, checkpoint_of, recomputes


@pytest.mark.parametrize(
    ("mode", "expected"), [("always", "RRRR"), ("except_last", "RRR-"), ("never", "----")]
)
def test_modes_decide_which_micro_batches_recompute(mode: str, expected: str) -> None:
    shares = checkpoint_of(mode, training=True).shares(4)
    assert "".join("R" if recomputes(share) else "-" for share in shares) == expected
    assert not any(map(recomputes, checkpoint_of(mode, training=False).shares(4)))


def test_a_single_micro_batch_counts_as_the_last() -> None:
    assert Checkpoint(0.25, 0.5).shares(1) == [0.5]
    assert Checkpoint(0.25, 0.5).shares(3) == [0.25, 0.25, 0.5]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_saved_fractions_outside_of_0_to_1_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match=f"must be within 0 and 1, got {share}"):
        check_share(share)
