"""Pipelines over two processes whose stages are on fake GPUs: bits, copies, races and failures.

Tensors travel by gloo through pinned memory, or by a stand-in for NCCL (fake_nccl.py). NCCL itself needs
GPUs: tests/distributed/test_gpus.py.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import needs_gloo
from tests.fake_cuda import process
from tests.fake_cuda.race_detector import Line, check, read
from tests.fake_cuda.test_pipelines import lines_in_steps, without_waits

pytestmark = needs_gloo

NUM_RANKS = 2
NEEDS_PYTHON_GROUPS = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14),
    reason="a process group in Python needs torch 2.14",
)
# The longer tests also use the stand-in for NCCL.
both_backends = pytest.mark.parametrize(
    "backend", ["gloo", pytest.param("nccl", marks=[NEEDS_PYTHON_GROUPS, pytest.mark.extended])]
)
several_models = pytest.mark.parametrize(
    ("models", "schedules"),
    [
        ("skips", "1f1b"),
        pytest.param("batch norm/gpt/tuples/dropout/ties", "gpipe/zb-h1", marks=pytest.mark.extended),
    ],
    ids=["one", "all"],
)
Runs = Callable[..., list[str]]


@pytest.fixture
def run(libraries: tuple[Path, Path], tmp_path: Path) -> Runs:
    """Runs the ranks of a case, and returns the line that each prints; `log0` and `log1` are their logs."""

    def rank(number: int, size: int, words: tuple[str, ...], variables: dict[str, int]) -> str:
        log = {} if "defer" in variables else {"log": tmp_path / f"log{number}"}
        place = str(number), str(size), str(tmp_path / "store")
        return process.run("mesh_cases.py", libraries, *place, *words, **log, **variables)[-1]

    def ranks(*words: str, size: int = NUM_RANKS, **variables: int) -> list[str]:
        for left in (tmp_path / "store", *tmp_path.glob("log*")):  # of an earlier run
            left.unlink(missing_ok=True)
        with ThreadPoolExecutor(size) as pool:
            return [*pool.map(lambda number: rank(number, size, words, variables), range(size))]

    return ranks


def logs(folder: Path, size: int = NUM_RANKS) -> list[list[Line]]:
    return [read(folder / f"log{rank}") for rank in range(size)]


@both_backends
@several_models
def test_bits_equal_those_of_one_process_without_races(
    models: str, schedules: str, backend: str, run: Runs, tmp_path: Path
) -> None:
    number = len(models.split("/")) * len(schedules.split("/"))
    assert run(backend, "same_bits", models, schedules, "cuda:1", late=1) == [str(number)] * NUM_RANKS
    assert [check(lines, may_wait=True) for lines in logs(tmp_path)] == [[], []]


@both_backends
@pytest.mark.parametrize(
    ("model", "schedule"),
    [("skips", "1f1b"), pytest.param("ties", "zb-h1", marks=pytest.mark.extended)],
)
def test_copies_go_through_pinned_memory_on_streams_of_their_own(
    model: str, schedule: str, backend: str, run: Runs, tmp_path: Path
) -> None:
    """No worker waits for the device: for gloo, a thread waits for the copies to the host, and nothing else.

    Only the loss, which all ranks return, is read by the caller of the last rank.
    """
    run(backend, "steps", model, schedule, "cuda", late=1)
    for rank, lines in enumerate(logs(tmp_path)):
        assert check(lines, may_wait=True) == []
        inside = [lines[p] for p in lines_in_steps(lines)]
        computing = {line.words[0] for line in inside if line.kind in ("read", "write")}
        copies = [line for line in inside if line.kind == "copy"]
        assert {line.words[1] for line in copies if line.words[0] not in computing} == {"d2p", "p2d"}
        assert not [line for line in copies if line.words[1] == "d2p" and line.words[0] in computing]
        workers = {line.thread for line in inside if line.kind in ("read", "write", "copy")}
        waits = [line for line in inside if line.kind.startswith("synchronize")]
        by_threads = [line for line in waits if line.thread not in workers]
        sent = sum(line.words[1] == "d2p" for line in copies)
        assert [line.kind for line in by_threads] == ["synchronize event"] * (
            sent if backend == "gloo" else 0
        )
        losses = ["synchronize stream"] * sum(line.words[1] == "d2h" for line in copies)
        assert [line.kind for line in waits if line.thread in workers] == losses
        assert bool(losses) == (rank == NUM_RANKS - 1)


@both_backends
@pytest.mark.parametrize("action", ["0F1", pytest.param("1I0", marks=pytest.mark.extended)])
def test_a_failing_action_ends_the_step_of_both_ranks(action: str, backend: str, run: Runs) -> None:
    """Groups of NCCL are aborted. The next step has new ones, and equals the first."""
    own, other = run(backend, "failing", action, late=1)[:: 1 if action[0] == "0" else -1]
    assert own.startswith("ValueError: injected ValueError (in action " + action)
    assert other.startswith(f"RuntimeError: rank {action[0]} has failed, so no rank changed anything")


@NEEDS_PYTHON_GROUPS
@pytest.mark.parametrize(
    ("action", "num_stages", "room"),
    [
        ("0F1", 2, 4),
        ("0F1", 2, 10_000),
        ("0F1", 4, 4),
        *(
            pytest.param(action, num_stages, room, marks=pytest.mark.extended)
            for num_stages, actions in ((2, "0F0 0F2 1I0 1I2"), (4, "2F0 1F1 3I1 2I0"))
            for action in actions.split()
            for room in (4, 12, 10_000)
        ),
    ],
)
def test_a_rank_that_is_blocked_learns_that_another_has_failed(
    action: str, num_stages: int, room: int, run: Runs
) -> None:
    """A rank has enqueued a receive that nobody sends, and as much after it as a stream holds.

    Then a launch blocks it; or, if a stream holds everything, the end of the step, where it reads the loss.
    With four stages, the rank that fails may be blocked in its other stage.
    """
    rank = int(action[0]) % 2
    own, other = run("nccl", "failing", action, str(num_stages), defer=1, room=room)[:: 1 - 2 * rank]
    assert own.startswith("ValueError: injected ValueError (in action " + action)
    assert other.startswith(f"RuntimeError: rank {rank} has failed, so no rank changed anything")


@NEEDS_PYTHON_GROUPS
@pytest.mark.parametrize(
    ("models", "schedules", "num_stages"),
    [
        ("skips/ties", "1f1b", 2),
        pytest.param("skips/ties", "gpipe/1f1b/zb-h1", 2, marks=pytest.mark.extended),
        pytest.param("skips/ties", "gpipe/1f1b/zb-h1/interleaved", 4, marks=pytest.mark.extended),
    ],
)
def test_ranks_whose_allocations_wait_for_the_device_do_not_wait_for_each_other(
    models: str, schedules: str, num_stages: int, run: Runs
) -> None:
    """Memory is short: each allocation waits for all transfers that the device has begun."""
    words = models, schedules, "cuda", "4", str(num_stages)
    found = run("nccl", "same_bits", *words, defer=1, scarce=1, room=1000)
    number = len(models.split("/")) * len(schedules.split("/"))
    assert found == [str(number)] * NUM_RANKS


@both_backends
def test_tied_gradients_are_summed_when_they_have_arrived(backend: str, run: Runs) -> None:
    """The stage that sums is not the last one of its process to end."""
    words = "tied neighbours", "gpipe/1f1b/zb-h1", "cuda", "4", "4"
    assert run(backend, "same_bits", *words, defer=1) == ["3"] * NUM_RANKS


@pytest.mark.parametrize("number", [9, *(pytest.param(n, marks=pytest.mark.extended) for n in (34, 64))])
def test_a_failing_gpu_ends_the_step_of_both_ranks(number: int, run: Runs) -> None:
    """No process aborts, as it would if memory that several streams use were freed on a failed device."""
    first, second = run("gloo", "losing_the_device", str(number), late=1)
    assert "illegal memory access" in first
    assert second.startswith("RuntimeError: rank 0 has failed")
    assert "illegal memory access" in second


def test_ranks_must_have_one_type_of_device(run: Runs) -> None:
    for error in run("gloo", "mixed"):
        assert "differ in the type of devices: here c" in error


several_divisions = pytest.mark.parametrize(
    ("dim", "model", "size", "stages"),
    [
        ("tp", "llama", 2, 1),
        ("fsdp", "gpt", 2, 1),
        pytest.param("tp", "gpt", 4, 2, marks=pytest.mark.extended),
        pytest.param("fsdp", "llama", 4, 2, marks=pytest.mark.extended),
    ],
)


@NEEDS_PYTHON_GROUPS
@several_divisions
def test_divided_layers_have_the_numbers_of_plain_loops_without_races(
    dim: str, model: str, size: int, stages: int, run: Runs, tmp_path: Path
) -> None:
    """Collectives run on streams of their groups, which the stages' streams wait for, and no worker does."""
    words = dim, model, str(stages), "1f1b"
    assert run("nccl", "divided_numbers", *words, size=size, late=1) == ["[]"] * size
    run("nccl", "divided_steps", *words, size=size, late=1)
    for lines in logs(tmp_path, size):
        assert check(lines, may_wait=True) == []
        inside = [lines[p] for p in lines_in_steps(lines)]
        computing = {line.words[0] for line in inside if line.kind in ("read", "write")}
        copies = [line for line in inside if line.kind == "copy"]
        assert {"d2p", "p2d"} <= {line.words[1] for line in copies if line.words[0] not in computing}
        losses = [line for line in copies if line.words[1] == "d2h"]
        waits = [line.kind for line in inside if line.kind.startswith("synchronize")]
        assert waits == ["synchronize stream"] * len(losses)
        # Without the waits of those that compute, or of those that copy for a group, there are races.
        waiting = {line.words[0] for line in inside if line.kind == "wait"}
        copying = {line.words[0] for line in copies if line.words[1] in ("d2p", "p2d")}
        assert any(check(without_waits(lines, each), may_wait=True) for each in sorted(waiting & computing))
        assert any(check(without_waits(lines, each), may_wait=True) for each in sorted(waiting & copying))


@NEEDS_PYTHON_GROUPS
@pytest.mark.parametrize(
    ("dim", "size", "stages", "schedules", "variables"),
    [
        ("tp", 2, 1, "1f1b", {"defer": 5, "late": 1, "room": 10_000}),
        ("fsdp", 2, 1, "1f1b", {"defer": 1, "scarce": 1, "room": 1000}),
        *(
            pytest.param(*division, "gpipe/1f1b/zb-h1", variables, marks=pytest.mark.extended)
            for division in (("tp", 4, 2), ("fsdp", 4, 2))
            for variables in ({"defer": 5, "late": 1, "room": 4}, {"defer": 1, "scarce": 1, "room": 1000})
        ),
    ],
)
def test_deferred_collectives_keep_the_numbers_and_do_not_wait_for_each_other(
    dim: str, size: int, stages: int, schedules: str, variables: dict[str, int], run: Runs
) -> None:
    words = dim, "llama", str(stages), schedules
    assert run("nccl", "divided_like_on_cpus", *words, size=size, **variables) == ["True"] * size


@NEEDS_PYTHON_GROUPS
@pytest.mark.parametrize(
    ("dim", "size", "stages", "action", "rank", "variables"),
    [
        ("tp", 2, 1, "0F1", 0, {"late": 1}),
        ("tp", 2, 1, "1I2", 1, {"defer": 1, "room": 4}),
        ("fsdp", 2, 1, "1I0", 0, {"defer": 1, "room": 10_000}),
        pytest.param("tp", 4, 2, "0F1", 1, {"defer": 1, "room": 4}, marks=pytest.mark.extended),
        pytest.param("fsdp", 4, 2, "1I3", 3, {"defer": 1, "room": 10_000}, marks=pytest.mark.extended),
    ],
)
def test_a_failure_ends_the_collectives_of_all_ranks(
    dim: str, size: int, stages: int, action: str, rank: int, variables: dict[str, int], run: Runs
) -> None:
    """Devices wait in collectives that the rank never begins. Later steps have new groups."""
    found = run("nccl", "divided_failing", dim, str(stages), action, str(rank), size=size, **variables)
    own = found.pop(rank)
    assert own.startswith("ValueError: injected ValueError (in action " + action)
    for other in found:
        assert other.startswith(f"RuntimeError: rank {rank} has failed, so no rank changed anything")
