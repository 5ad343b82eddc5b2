"""What idle time is blamed on, in recordings whose times are known."""

from __future__ import annotations

import re

import pytest

from gpipe_fast.reports.report import Report
from tests.unit.reports.test_report import recorded


def shares(report: Report) -> dict[str, float]:
    assert sum(report.blame.values()) == pytest.approx(1)
    return {cause: share for cause, share in report.blame.items() if share > 1e-9}


def test_equal_stages_wait_for_fill_and_drain_alone() -> None:
    report = recorded("gpipe", 4, 8, checkpoint="never", weights=0).report()
    assert report.step == pytest.approx(11 * 3)
    assert report.bubble == pytest.approx(3 / 11) == report.bubble_of_equal_stages
    assert shares(report) == pytest.approx({"fill and drain": 1})
    assert [stage.busy for stage in report.stages] == pytest.approx([24] * 4)
    assert report.busy_bound == pytest.approx(24)
    assert report.path_seconds == pytest.approx(33)


def test_a_slow_stage_is_an_imbalance() -> None:
    """Replays: 4 stages of mean times take 11 * 3.75; the slow one makes it 8 * 6 + 3 * 3."""
    report = recorded(
        "gpipe", 4, 8, checkpoint="never", weights=0, forward=[1, 1, 2, 1], backward=[2, 2, 4, 2]
    ).report()
    assert report.step == pytest.approx(57)
    idle = 4 * 57 - 8 * (3 + 3 + 6 + 3)
    imbalance = 4 * (57 - 11 * 3.75)
    expected = {"fill and drain": 1 - imbalance / idle, "imbalance": imbalance / idle}
    assert shares(report) == pytest.approx(expected)


def test_copies_and_lost_time_are_told_apart() -> None:
    copying = recorded("gpipe", 2, 4, checkpoint="never", weights=0, transfer=0.5).report()
    without = recorded("gpipe", 2, 4, checkpoint="never", weights=0).report()
    assert [stage.copying for stage in copying.stages] == pytest.approx([2, 2])
    idle = 2 * copying.step - 2 * 12
    assert shares(copying)["transfer"] == pytest.approx(2 * (copying.step - without.step) / idle)
    assert "host" not in shares(copying)
    lost = recorded("gpipe", 2, 4, stretch=1.25, checkpoint="never", weights=0).report()
    assert lost.path_seconds == pytest.approx(without.step)
    # The last action is not stretched itself.
    assert lost.step == pytest.approx(1.25 * 15 - 0.25 * 2)
    assert shares(lost)["host"] == pytest.approx(2 * (lost.step - 15) / (2 * lost.step - 24))


def test_waiting_for_recomputes_is_told_from_their_own_time() -> None:
    """Only stage 1 takes long for a recompute, so stage 0 waits for it."""
    report = recorded(
        "gpipe", 2, 4, checkpoint="always", weights=0, recompute=[0.0, 1.0], forward=1, backward=2
    ).report()
    without = recorded("gpipe", 2, 4, checkpoint="never", weights=0, forward=1, backward=2).report()
    assert report.recompute == pytest.approx(4)
    idle = 2 * report.step - 24 - 4
    assert shares(report)["recompute"] == pytest.approx((2 * (report.step - without.step) - 4) / idle)
    assert re.search(r"recompute, of the busy time +14.3%", str(report))
