"""Lines of progress of benchmarks, by a simulated clock."""

from __future__ import annotations

import pytest

from bench import progress
from bench.__main__ import BENCHMARKS, run, summary
from bench.measure import alternate


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Returns a list with the time in seconds."""
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    return now


def test_lines_say_what_is_done_and_how_long_the_rest_takes(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in progress.shown(range(40), "timing rounds"):
        clock[0] += 3.0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "bench: timing rounds (1 of 40 done), about 117 s left"
    assert lines[1] == "bench: timing rounds (5 of 40 done), about 105 s left"
    assert len(lines) == 10


def test_short_work_is_silent(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    for _ in progress.shown(range(40), "timing rounds"):
        clock[0] += 0.01
    assert not capsys.readouterr().err


def test_alternating_candidates_show_their_rounds(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    def candidate() -> None:
        clock[0] += 2.0

    alternate({"one": candidate}, rounds=3)
    assert capsys.readouterr().err == "bench: timing rounds (1 of 4 done), about 6 s left\n"


def test_a_benchmark_says_at_once_that_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.compare.overhead.main", lambda: None)
    run(BENCHMARKS, ["overhead"])
    assert capsys.readouterr().err == f"bench: overhead: {summary('bench.compare.overhead')}\n"


def test_arguments_follow_the_name_of_one_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[str] = []
    monkeypatch.setattr("bench.compare.overhead.main", received.extend)
    run(BENCHMARKS, ["overhead", "--flag", "x"])
    assert received == ["--flag", "x"]
    for wrong in ([], ["nothing"], ["overhead", "step", "--flag"]):
        with pytest.raises(SystemExit, match="overhead"):
            run(BENCHMARKS, wrong)
