"""Checkpoint policies: which micro-batches of which stages recompute, and how much."""

from __future__ import annotations

import pytest

from gpipe_fast.lower.checkpoint import Checkpoint, check_saved_fraction, checkpoint_policy, has_recompute


@pytest.mark.parametrize(
    ("mode", "expected"), [("always", "RRRR"), ("except_last", "RRR-"), ("never", "----"), (0.5, "RRRR")]
)
def test_modes_decide_which_micro_batches_recompute(mode: str | float, expected: str) -> None:
    saved_fractions = checkpoint_policy(mode, 2, training=True).saved_fractions(1, 4)
    assert "".join("R" if has_recompute(share) else "-" for share in saved_fractions) == expected
    assert not checkpoint_policy(mode, 2, training=False).recomputed(4)


def test_the_ends_of_shares_are_modes() -> None:
    for share, mode in [(0.0, "always"), (1.0, "never")]:
        assert checkpoint_policy(share, 2, True) == checkpoint_policy(mode, 2, True)


def test_each_stage_has_its_own_mode_or_share() -> None:
    policy = checkpoint_policy((0.25, "except_last", "never"), 3, training=True)
    assert policy == Checkpoint(((0.25,), (0.0, 1.0), (1.0,)))
    assert policy.recomputed(2) == {(0, 0), (0, 1), (1, 0)}
    assert hash(policy) == hash(checkpoint_policy((0.25, "except_last", 1.0), 3, training=True))


def test_a_policy_may_differ_for_every_micro_batch() -> None:
    policy = Checkpoint(((0.0, 0.25, 0.5, 1.0),))
    assert policy.saved_fractions(0, 4) == [0.0, 0.25, 0.5, 1.0]
    assert policy.saved_fractions(0, 2) == [0.5, 1.0]


def test_a_single_micro_batch_counts_as_the_last() -> None:
    policy = Checkpoint(((0.25, 0.5),))
    assert policy.saved_fractions(0, 1) == [0.5]
    assert policy.saved_fractions(0, 3) == [0.25, 0.25, 0.5]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_saved_fractions_outside_of_0_to_1_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match=f"must be within 0 and 1, got {share}"):
        check_saved_fraction(share)
