"""`GPipe.stream` on the fake CUDA runtime: the bits of calls, and no races."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fake_cuda import process
from tests.fake_cuda.build import can_build
from tests.fake_cuda.race_detector import Line, check, read
from tests.fake_cuda.test_pipelines import FOUR_DEVICES, ONE_DEVICE, WITH_CPU, lines_in_steps

pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
)

MODELS = "mlp/skips/several/batch norm/dropout/tied"
Runs = Callable[..., list[Line]]


@pytest.fixture
def stream(libraries: tuple[Path, Path], tmp_path: Path) -> Runs:
    """Runs streams, checks their bits, and returns the log."""

    def run(models: str, devices: str, *words: str) -> list[Line]:
        log = tmp_path / "log"
        found = process.run("stream_cases.py", libraries, models, devices, *words, late=1, log=log)
        assert found == ["equal"]
        return read(log)

    return run


@pytest.mark.parametrize(
    ("models", "devices"),
    [
        ("mlp/skips/dropout", FOUR_DEVICES),
        *(
            pytest.param(MODELS, each, marks=pytest.mark.extended)
            for each in (FOUR_DEVICES, ONE_DEVICE, WITH_CPU)
        ),
    ],
)
def test_results_equal_those_of_calls_without_races(models: str, devices: str, stream: Runs) -> None:
    assert check(stream(models, devices, "own_streams")) == []


@pytest.mark.extended
@pytest.mark.parametrize("devices", [FOUR_DEVICES, ONE_DEVICE, WITH_CPU])
def test_layers_in_python(devices: str, stream: Runs) -> None:
    assert check(stream("python/beside", devices)) == []


@pytest.mark.extended
@pytest.mark.parametrize("devices", [FOUR_DEVICES, ONE_DEVICE])
@pytest.mark.parametrize("word", ["between", "failures", "pinned"])
def test_calls_between_results_failures_and_copies_cause_no_race(
    word: str, devices: str, stream: Runs
) -> None:
    models = "mlp/skips" if word == "between" else "mlp/skips/dropout"  # such calls draw other numbers
    assert check(stream(models, devices, word, "own_streams")) == []


@pytest.mark.extended
def test_the_checker_detects_missing_waits_of_a_stream(stream: Runs) -> None:
    """Removes all waits of one stream within streams from the log, for each stream."""
    lines = stream("mlp", FOUR_DEVICES)
    inside = set(lines_in_steps(lines))
    waiting = {lines[p].words[0] for p in inside if lines[p].kind == "wait"}
    needed = set()
    for each in waiting:
        kept = [
            line
            for index, line in enumerate(lines)
            if not (index in inside and line.kind == "wait" and line.words[0] == each)
        ]
        if check(kept):
            needed.add(each)
    assert len(needed) >= 6, "the caller waits for results, the stages for the caller and for one another"
