"""Pipelines come and go: threads and memory they give back, copies, forks, and the interpreter's exit."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import pickle
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.inside import plant_failure
from tests.reference import collect, leaf, loop_step, pipeline, pipeline_step, unequal
from tests.unit.runtime.lifetime_programs import layers, num_threads

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc"),
]


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """Pipelines of earlier tests that wait for the collector would end their threads within this one."""
    gc.collect()


def features() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def wide() -> nn.Sequential:
    """Few operators, which are traced quickly; a gradient, or what a micro-batch keeps, takes 256 KiB."""
    return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))


def use(number: int, model: nn.Sequential, x: Tensor) -> None:
    """Makes a pipeline, uses it, and drops it at one of several points of its life."""
    pipe = GPipe(model, [1, 1], chunks=2, checkpoint="never")
    if number % 10 == 9:
        return
    if number % 10 == 8:
        plant_failure(pipe, "1F1")
        with pytest.raises(ValueError, match="injected"):
            pipe(x)
        return
    output = pipe(x)
    if number % 10 == 7:
        return  # never run backward
    if number % 10 == 6:
        del pipe
    output.sum().backward(retain_graph=number % 10 == 5)
    model.zero_grad()


def resident_bytes() -> int:
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cycles(count: int) -> tuple[int, float]:
    """How many threads more there are after so many pipelines, and how many bytes more per pipeline."""
    model, x = wide(), torch.randn(512, 256)
    for number in range(60):
        use(number, model, x)
    memory, threads = resident_bytes(), num_threads()
    for number in range(count):
        use(number, model, x)
    grown = resident_bytes() - memory
    return num_threads() - threads, grown / count


# PyTorch keeps the source text of every graph that it traces: here some 7 KB for each pipeline.
MOST_BYTES = 80e3


def stays(count: int) -> tuple[int, float]:
    """As `cycles`, for pipelines that stay, each with what it keeps for a backward."""
    model, x = wide(), torch.randn(512, 256)
    use(0, model, x)
    memory, threads = resident_bytes(), num_threads()
    kept = []
    for _ in range(count):
        pipe = GPipe(model, [1, 1], chunks=2, checkpoint="never")
        kept.append((pipe, pipe(x)))
    grown = resident_bytes() - memory
    return num_threads() - threads, grown / count


def in_own_process(measure: str, count: int) -> tuple[int, float]:
    """One of the two above where no other test has used memory."""
    code = f"import test_lifetime as t; t.torch.set_num_threads(1); print(*t.{measure}({count}))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    threads, bytes_each = done.stdout.split()
    return int(threads), float(bytes_each)


@pytest.mark.extended
@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.soak)])
def test_pipelines_come_and_go(count: int) -> None:
    threads, bytes_each = in_own_process("cycles", count)
    assert threads == 0
    assert bytes_each < MOST_BYTES


@pytest.mark.extended
def test_the_count_of_what_stays_can_fail() -> None:
    threads, bytes_each = in_own_process("stays", 10)
    assert threads == 20
    assert bytes_each > MOST_BYTES


def test_workers_come_with_the_first_step_and_go_with_the_pipeline() -> None:
    before = num_threads()
    pipe = GPipe(layers(), [2, 2, 2], chunks=4)
    assert num_threads() == before
    for _ in range(3):
        pipe(features())
        assert num_threads() == before + 3
    gone = weakref.ref(pipe)
    del pipe
    assert gone() is None
    assert num_threads() == before


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_graph_outlives_its_pipeline(checkpoint: str) -> None:
    model, x, before = layers(), leaf(features()), num_threads()
    expected = loop_step(model, x, 4)
    pipe = GPipe(model, [2, 2, 2], chunks=4, checkpoint=checkpoint)
    output, gone = pipeline(pipe, x), weakref.ref(pipe)
    del pipe
    gc.collect()
    assert gone() is None
    assert num_threads() == before + 3
    assert unequal(collect(model, x, output), expected) == []
    del output
    assert num_threads() == before


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_train_on_their_own(way: str, used: bool, tmp_path: Path) -> None:
    """What is copied is the model; threads, programs and what a mini-batch keeps stay with the original."""
    pipe, x = GPipe(layers(), [2, 2, 2], chunks=4, checkpoint="always"), features()
    pipe.threads_per_stage = 1
    expected = loop_step(nn.Sequential(*pipe), x, 4)
    pending = pipeline(pipe, x) if used else None
    start = {name: value.clone() for name, value in pipe.state_dict().items()}
    if way == "deepcopy":
        made = copy.deepcopy(pipe)
    elif way == "pickle":
        made = pickle.loads(pickle.dumps(pipe))
    else:
        torch.save(pipe, tmp_path / "pipe.pt")
        made = torch.load(tmp_path / "pipe.pt", weights_only=False)
    assert (made.balance, made.chunks, made.checkpoint, made.threads_per_stage) == ([2, 2, 2], 4, "always", 1)
    assert not {p.data_ptr() for p in made.parameters()} & {p.data_ptr() for p in pipe.parameters()}
    before = num_threads()
    made(x).square().sum().backward()
    assert num_threads() == before + 3
    assert all(torch.equal(value, start[name]) for name, value in pipe.state_dict().items())
    assert all(p.grad is None for p in pipe.parameters())
    for which in (made, pipe):
        which.load_state_dict(start)
        which.zero_grad()
        assert unequal(pipeline_step(which, x), loop_step(nn.Sequential(*which), x, 4)) == []
    if pending is not None:
        del pending
    else:
        assert unequal(pipeline_step(pipe, x), expected) == []


def run(*arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """One of lifetime_programs.py."""
    command = [
        sys.executable,
        "-W",
        "ignore::DeprecationWarning",
        "lifetime_programs.py",
        *map(str, arguments),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("how", "status"), [("end", 0), ("exit", 3), ("exception", 1)])
def test_the_interpreter_exits(how: str, status: int) -> None:
    """With a pipeline and graphs of it as globals: at the program's end, by sys.exit, by an exception."""
    begin = time.monotonic()
    done = run("leave", how)
    assert done.returncode == status, done.stderr
    if how == "exception":
        assert done.stderr.endswith("\nLookupError: as planned\n")
        assert done.stderr.count("Traceback") == 1
    else:
        assert done.stderr == ""
    assert time.monotonic() - begin < 20


def check_children(kinds: list[str], program: str, of_each: int) -> None:
    """All of them ended with status 0 and without a word, and the parent too."""
    done = run(program, "+".join(kinds), of_each, timeout=60 + 25 * len(kinds) * of_each)
    assert done.stdout == f"{len(kinds) * of_each} children\n", done.stderr
    assert (done.returncode, done.stderr) == (0, "")


# In the middle of a short step and of a long one, by several threads, by one that goes on after errors, and
# while a backward goes on outside of the pipeline.
DAEMONS = ["stops", "slow", "several", "catches", "leaving"]


@pytest.mark.extended
def test_the_interpreter_exits_while_a_daemon_thread_trains() -> None:
    check_children(DAEMONS, "daemon", of_each=2)


@pytest.mark.soak
def test_the_interpreter_exits_a_hundred_times_while_a_daemon_thread_trains() -> None:
    check_children(DAEMONS, "daemon", of_each=20)


# Of a pipeline that was never run, one that was, one whose step is half done, which a child may finish; and
# while another thread computes, or is delayed, in a step.
FORKS = ["new", "used", "half", "computing", "delayed"]


@pytest.mark.extended
def test_children_of_forks_train() -> None:
    """Bits equal to the parent's, by workers of their own; and the parent goes on."""
    check_children(FORKS, "forks", of_each=1)


@pytest.mark.soak
def test_a_hundred_children_of_forks_train() -> None:
    check_children(FORKS, "forks", of_each=20)


@pytest.mark.soak
def test_the_child_of_a_fork_trains_though_another_thread_was_tracing() -> None:
    check_children(["tracing"], "forks", of_each=3)


@pytest.mark.extended
def test_children_of_forks_end_though_the_parent_was_in_a_step() -> None:
    check_children(["delayed"], "forks_to_end", of_each=2)


@pytest.mark.extended
def test_a_data_loader_forks() -> None:
    """Workers that run a pipeline themselves, while the parent trains another on what they load."""
    done = run("data_loader")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
