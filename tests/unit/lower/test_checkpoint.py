"""Checkpoint policies: which micro-batches recompute."""

from __future__ import annotations

import pytest

from gpipe_fast.lower.checkpoint import Checkpoint, check_saved_fraction, checkpoint_policy, has_recompute


@pytest.mark.parametrize(
    ("mode", "expected"), [("always", "RRRR"), ("except_last", "RRR-"), ("never", "----")]
)
def test_modes_decide_which_micro_batches_recompute(mode: str, expected: str) -> None:
    saved_fractions = checkpoint_policy(mode, training=True).saved_fractions(4)
    assert "".join("R" if has_recompute(share) else "-" for share in saved_fractions) == expected
    assert not any(map(has_recompute, checkpoint_policy(mode, training=False).saved_fractions(4)))


def test_a_single_micro_batch_counts_as_the_last() -> None:
    assert Checkpoint(0.25, 0.5).saved_fractions(1) == [0.5]
    assert Checkpoint(0.25, 0.5).saved_fractions(3) == [0.25, 0.25, 0.5]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_saved_fractions_outside_of_0_to_1_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match=f"must be within 0 and 1, got {share}"):
        check_saved_fraction(share)
