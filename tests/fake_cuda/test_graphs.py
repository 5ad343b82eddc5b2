"""Captured steps on the fake CUDA runtime: bits, races, memory, and changes between replays.

The fake runtime executes a captured graph's operations again at every launch, and destroys the results of the
capture itself; the log contains the accesses of every launch, on new streams.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda.build import can_build
from tests.fake_cuda.process import run
from tests.fake_cuda.race_detector import Line, check, read

pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
)

MODELS = ("mlp", "skips", "several", "batch norm", "dropout", "tied", "convolutions")
FOUR_DEVICES, ONE_DEVICE = "cuda:0,cuda:1,cuda:2,cuda:3", "cuda:1,cuda:1,cuda:1,cuda:1"
CASES = (
    "replaced_parameter",
    "two_forwards_in_flight",
    "backward_twice",
    "other_gradient_layouts",
    "inference",
    "kept_gradients",
    "capture_turned_off",
    "changed_setting",
    "alternating_shapes",
    "more_shapes_than_places",
    "batch_in_second_dimension",
    "several_threads",
)

SEVERAL_PLANS = (
    "inference_before_a_backward",
    "two_shapes_in_flight_16_first",
    "two_shapes_in_flight_8_first",
    "capture_while_another_plan_is_in_flight",
    "graphs_freed_between_forward_and_backward",
    "kept_output_blocks_replays",
    "replicated_gradient",
)

Libraries = tuple[Path, Path]


@pytest.mark.parametrize(
    ("models", "devices", "checkpoints"),
    [
        (("skips", "batch norm"), FOUR_DEVICES, ["except_last"]),
        *(
            pytest.param(MODELS, each, ["never", "except_last", "always"], marks=pytest.mark.extended)
            for each in (FOUR_DEVICES, ONE_DEVICE)
        ),
    ],
    ids=["some", "four", "one"],
)
def test_captured_models_equal_the_plain_loop_without_races(
    models: tuple[str, ...], devices: str, checkpoints: list[str], libraries: Libraries, tmp_path: Path
) -> None:
    words = ("/".join(models), devices, "captured", *checkpoints)
    assert run("train_models.py", libraries, *words, late=1, log=tmp_path / "log") == ["equal"]
    assert check(read(tmp_path / "log")) == []


@pytest.mark.extended
@pytest.mark.parametrize("word", ["own_streams", "pinned", "peer"])
@pytest.mark.parametrize("devices", [FOUR_DEVICES, ONE_DEVICE], ids=["four", "one"])
def test_captured_steps_keep_bits_on_caller_streams_and_every_transport(
    devices: str, word: str, libraries: Libraries, tmp_path: Path
) -> None:
    words = ("skips/batch norm", devices, "captured", word, "except_last")
    assert run("train_models.py", libraries, *words, late=1, log=tmp_path / "log") == ["equal"]
    assert check(read(tmp_path / "log")) == []


@pytest.mark.extended
def test_changes_between_replays_are_handled(libraries: Libraries, tmp_path: Path) -> None:
    found = run("graph_cases.py", libraries, "/".join(CASES), FOUR_DEVICES, late=1, log=tmp_path / "log")
    assert found == [f"{case}: equal" for case in CASES]
    assert check(read(tmp_path / "log"), may_wait=True) == []


@pytest.mark.parametrize(
    ("devices", "checkpoint"),
    [
        pytest.param(ONE_DEVICE, "except_last", id="one-except_last"),
        pytest.param(ONE_DEVICE, "never", id="one-never", marks=pytest.mark.extended),
        pytest.param(FOUR_DEVICES, "always", id="four-always", marks=pytest.mark.extended),
    ],
)
def test_several_captured_plans_share_memory_safely(
    devices: str, checkpoint: str, libraries: Libraries, tmp_path: Path
) -> None:
    """No plan overwrites what another plan keeps for its backward in the graphs' shared memory."""
    words = ("/".join(SEVERAL_PLANS), devices, checkpoint)
    found = run("shared_graph_memory_cases.py", libraries, *words, late=1, log=tmp_path / "log")
    assert found == [f"{case}: equal" for case in SEVERAL_PLANS]
    assert check(read(tmp_path / "log"), may_wait=True) == []


@pytest.mark.extended
@pytest.mark.parametrize(
    ("program", "cases", "devices"),
    [("shared_graph_memory_cases.py", SEVERAL_PLANS, ONE_DEVICE), ("graph_cases.py", CASES, FOUR_DEVICES)],
    ids=["several_plans", "captures"],
)
def test_graph_cases_keep_bits_when_work_is_deferred(
    program: str, cases: tuple[str, ...], devices: str, libraries: Libraries
) -> None:
    found = run(program, libraries, "/".join(cases), devices, "never", defer=1)
    assert found == [f"{case}: equal" for case in cases]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("variable", "value"),
    [("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"), ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")],
)
def test_allocators_without_capture_run_uncaptured(
    variable: str, value: str, libraries: Libraries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    found = run("shared_graph_memory_cases.py", libraries, "allocator_cannot_capture", FOUR_DEVICES)
    assert found == ["allocator_cannot_capture: equal"]


@pytest.mark.extended
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_capture_needs_little_more_memory_than_an_uncaptured_step(
    checkpoint: str, libraries: Libraries
) -> None:
    """The uncaptured steps have already filled the allocator's cache."""
    (needed,) = run("graph_memory.py", libraries, f"needed_{checkpoint}")
    memory = int(int(needed) * 1.3)
    assert run("graph_memory.py", libraries, f"captured_{checkpoint}", memory=memory) == ["3 replays"]


def test_workspaces_of_other_streams_are_kept(libraries: Libraries) -> None:
    """The capture has memory for workspaces in the graphs' pool, because it frees those of its streams."""
    workspace = 64 << 20
    (needed,) = run("graph_memory.py", libraries, "needed_always", workspace=workspace)
    found = run(
        "graph_memory.py", libraries, "workspaces", workspace=workspace, memory=int(int(needed) * 1.3)
    )
    assert found == ["1, 3 replays, 1"]


@pytest.mark.extended
def test_graphs_of_several_lengths_share_memory(libraries: Libraries) -> None:
    """Graphs of five lengths need little more memory than the longest one's, in either order of capture."""
    (found,) = run("graph_memory.py", libraries, "several_lengths")
    for modes in (found.split()[:3], found.split()[3:]):
        longest, longest_first, longest_last = map(int, modes)
        assert max(longest_first, longest_last) < 1.2 * longest, found


@pytest.mark.extended
def test_graphs_are_freed_when_memory_runs_out(libraries: Libraries) -> None:
    cases = ("short_of_memory_in_a_forward", "short_of_memory_in_a_backward")
    assert run("graph_memory.py", libraries, *cases, memory=720 << 20) == ["equal, 4 replays"] * 2


@pytest.mark.extended
@pytest.mark.parametrize(
    ("case", "operator"),
    [
        ("forward_cannot_be_captured", "aten::gelu"),
        ("backward_cannot_be_captured", "aten::gelu_backward"),
    ],
)
def test_operators_that_synchronize_run_uncaptured(
    case: str, operator: str, libraries: Libraries, tmp_path: Path
) -> None:
    found = run("graph_cases.py", libraries, case, FOUR_DEVICES, synchronizes=operator, log=tmp_path / "log")
    assert found == [f"{case}: equal"]
    assert check(read(tmp_path / "log"), may_wait=True) == []


@pytest.mark.extended
def test_the_checker_detects_missing_waits_in_a_graph(libraries: Libraries, tmp_path: Path) -> None:
    """Removes all waits of one stream of a launch from the log, for each stream."""
    words = ("mlp", FOUR_DEVICES, "captured", "except_last")
    assert run("train_models.py", libraries, *words, late=1, log=tmp_path / "log") == ["equal"]
    lines = read(tmp_path / "log")
    begin = next(index for index, line in enumerate(lines) if line.kind == "launch")
    end = next(index for index in range(begin, len(lines)) if lines[index].kind == "mark")
    graph_streams = {line.words[0] for line in lines[begin:end] if line.kind == "stream"}
    graph_streams |= {line.words[0] for line in lines[begin - 40 : begin] if line.kind == "stream"}
    busy = {line.words[0] for line in lines[begin:end] if line.kind in ("read", "write", "copy")}
    assert len(graph_streams & busy) >= 7, "four compute streams, and copy streams between them"

    def lines_without_waits(stream: str) -> list[Line]:
        return [
            line
            for index, line in enumerate(lines)
            if not (begin < index < end and line.kind == "wait" and line.words[0] == stream)
        ]

    for stream in graph_streams & busy:
        assert check(lines_without_waits(stream)), f"stream {stream} needs no wait"
