"""Runs that are replayed as graphs, on GPUs that are not there: bits, order, and what comes between.

A graph that the runtime of tests/fake_cuda captures is computed anew at every launch, and what was computed
while it was captured is lost; the log has the accesses of every launch, on streams of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda.build import can_build
from tests.fake_cuda.check import Line, check, read
from tests.fake_cuda.process import run

pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
)

MODELS = ("mlp", "skips", "several", "batch norm", "dropout", "tied", "convolutions")
FOUR, ONE = "cuda:0,cuda:1,cuda:2,cuda:3", "cuda:1,cuda:1,cuda:1,cuda:1"
CASES = (
    "replaced_parameter",
    "two_at_once",
    "backward_twice",
    "other_gradients",
    "inference",
    "kept_gradients",
    "turned_off",
    "settings",
    "other_shapes",
    "second_dimension",
    "threads",
)

Libraries = tuple[Path, Path]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [FOUR, ONE], ids=["four", "one"])
def test_bits_and_order(devices: str, libraries: Libraries, tmp_path: Path) -> None:
    words = ("/".join(MODELS), devices, "captured", "never", "except_last", "always")
    assert run("program.py", libraries, *words, late=1, log=tmp_path / "log") == ["equal"]
    assert check(read(tmp_path / "log")) == []


@pytest.mark.extended
@pytest.mark.parametrize("word", ["aside", "pinned", "peer"])
@pytest.mark.parametrize("devices", [FOUR, ONE], ids=["four", "one"])
def test_streams_and_transports(devices: str, word: str, libraries: Libraries, tmp_path: Path) -> None:
    words = ("skips/batch norm", devices, "captured", word, "except_last")
    assert run("program.py", libraries, *words, late=1, log=tmp_path / "log") == ["equal"]
    assert check(read(tmp_path / "log")) == []


@pytest.mark.extended
def test_between_replays(libraries: Libraries, tmp_path: Path) -> None:
    found = run("captures.py", libraries, "/".join(CASES), FOUR, late=1, log=tmp_path / "log")
    assert found == [f"{case}: equal" for case in CASES]
    assert check(read(tmp_path / "log"), may_wait=True) == []


@pytest.mark.extended
@pytest.mark.parametrize(
    ("case", "operator"),
    [
        ("cannot_be_captured", "aten::gelu"),
        ("backward_cannot_be_captured", "aten::gelu_backward"),
    ],
)
def test_what_waits_for_its_device_runs_as_it_is(
    case: str, operator: str, libraries: Libraries, tmp_path: Path
) -> None:
    found = run("captures.py", libraries, case, FOUR, synchronizes=operator, log=tmp_path / "log")
    assert found == [f"{case}: equal"]
    assert check(read(tmp_path / "log"), may_wait=True) == []


@pytest.mark.extended
def test_a_wait_that_a_graph_lacks_is_noticed(libraries: Libraries, tmp_path: Path) -> None:
    """Of each stream of a launch all waits."""
    words = ("mlp", FOUR, "captured", "except_last")
    assert run("program.py", libraries, *words, late=1, log=tmp_path / "log") == ["equal"]
    lines = read(tmp_path / "log")
    begin = next(place for place, line in enumerate(lines) if line.kind == "launch")
    end = next(place for place in range(begin, len(lines)) if lines[place].kind == "mark")
    of_graph = {line.words[0] for line in lines[begin:end] if line.kind == "stream"}
    of_graph |= {line.words[0] for line in lines[begin - 40 : begin] if line.kind == "stream"}
    working = {line.words[0] for line in lines[begin:end] if line.kind in ("read", "write", "copy")}
    assert len(of_graph & working) >= 7, "four stages and copies between them"

    def without(stream: str) -> list[Line]:
        return [
            line
            for place, line in enumerate(lines)
            if not (begin < place < end and line.kind == "wait" and line.words[0] == stream)
        ]

    for stream in of_graph & working:
        assert check(without(stream)), f"stream {stream} needs no wait"
