"""Lifetime of pipelines: released threads and memory, copies, forks, and the interpreter's exit."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gpipe_fast import GPipe
from tests.internals import inject_failure
from tests.programs import ROOT, run_python
from tests.reference import collect, leaf, loop_step, pipeline, pipeline_step, unequal
from tests.unit.runtime.exit_and_fork_programs import layers, num_threads

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc"),
]


@pytest.fixture(autouse=True)
def collect_garbage() -> None:
    """Collects pipelines of earlier tests, whose threads would otherwise end during this test."""
    gc.collect()


def features() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def wide() -> nn.Sequential:
    """Returns two layers, which trace fast; a weight's gradient or a micro-batch's input takes 256 KiB."""
    return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))


def make_and_drop(number: int, model: nn.Sequential, x: Tensor) -> None:
    """Makes a pipeline, uses it, and drops it in one of several states, which ``number`` selects."""
    pipe = GPipe(model, [1, 1], chunks=2, checkpoint="never")
    if number % 10 == 9:
        return
    if number % 10 == 8:
        inject_failure(pipe, "1F1")
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


def collect_all() -> None:
    """Collects garbage, and what that garbage has kept alive."""
    while gc.collect():
        pass


def resident_bytes() -> int:
    collect_all()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth_of_dropped_pipelines(count: int) -> tuple[int, float]:
    """Returns how many threads, and how many bytes per pipeline, ``count`` dropped pipelines leave behind."""
    model, x = wide(), torch.randn(512, 256)
    # Until Python's garbage collector has run on its own a few times, the heap grows by some 20 MB.
    for number in range(300):
        make_and_drop(number, model, x)
    memory, threads = resident_bytes(), num_threads()
    for number in range(count):
        make_and_drop(number, model, x)
    grown = resident_bytes() - memory
    return num_threads() - threads, grown / count


@pytest.mark.extended
@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.soak)])
def test_dropped_pipelines_release_threads_and_memory(count: int) -> None:
    """In a new process, where no other test has used memory."""
    measure = f"print(*t.growth_of_dropped_pipelines({count}))"
    code = f"import test_exit_and_fork as t; t.torch.set_num_threads(1); {measure}"
    done = run_python("-c", code, cwd=HERE, timeout=600)
    assert done.returncode == 0, done.stderr
    threads, bytes_each = map(float, done.stdout.split())
    assert threads == 0
    assert bytes_each < 80e3  # PyTorch keeps the source text of every graph that it traces: here some 7 KB


def test_dropped_pipelines_leave_no_graphs_and_fake_tensors() -> None:
    """Pipelines are dropped in each of the states that `make_and_drop` knows."""
    model, x = wide(), torch.randn(512, 256)

    def num_objects() -> int:
        collect_all()
        return sum(issubclass(type(each), (fx.Node, FakeTensor, ShapeEnv)) for each in gc.get_objects())

    make_and_drop(0, model, x)
    before = num_objects()
    for number in range(4, 10):
        make_and_drop(number, model, x)
    assert num_objects() <= before


def test_workers_start_with_the_first_step_and_end_with_the_pipeline() -> None:
    before = num_threads()
    pipe = GPipe(layers(), [2, 2, 2], chunks=4)
    assert num_threads() == before
    for _ in range(3):
        pipe(features())
        assert num_threads() == before + 3
    weak_pipe = weakref.ref(pipe)
    del pipe
    assert weak_pipe() is None
    assert num_threads() == before


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_graph_outlives_its_pipeline(checkpoint: str) -> None:
    model, x, before = layers(), leaf(features()), num_threads()
    expected = loop_step(model, x, 4)
    pipe = GPipe(model, [2, 2, 2], chunks=4, checkpoint=checkpoint)
    output, weak_pipe = pipeline(pipe, x), weakref.ref(pipe)
    del pipe
    gc.collect()
    assert weak_pipe() is None
    assert num_threads() == before + 3
    assert unequal(collect(model, x, output), expected) == []
    del output
    assert num_threads() == before


@pytest.mark.parametrize(("method", "used"), [("deepcopy", True), ("torch.save", False)], ids=str)
def test_copies_train_independently(method: str, used: bool, tmp_path: Path) -> None:
    """A copy has its own model; threads, programs and pending backwards stay with the original."""
    pipe, x = GPipe(layers(), [2, 2, 2], chunks=4, checkpoint="always"), features()
    pipe.threads_per_stage = 1
    expected = loop_step(nn.Sequential(*pipe), x, 4)
    pending = pipeline(pipe, x) if used else None
    start = {name: value.clone() for name, value in pipe.state_dict().items()}
    if method == "deepcopy":
        copied = copy.deepcopy(pipe)
    else:
        torch.save(pipe, tmp_path / "pipe.pt")
        copied = torch.load(tmp_path / "pipe.pt", weights_only=False)
    assert (copied.balance, copied.chunks, copied.checkpoint) == ([2, 2, 2], 4, "always")
    assert copied.threads_per_stage == 1
    assert not {p.data_ptr() for p in copied.parameters()} & {p.data_ptr() for p in pipe.parameters()}
    copied(x).square().sum().backward()
    assert all(torch.equal(value, start[name]) for name, value in pipe.state_dict().items())
    assert all(p.grad is None for p in pipe.parameters())
    for trained in (copied, pipe):
        trained.load_state_dict(start)
        trained.zero_grad()
        assert unequal(pipeline_step(trained, x), loop_step(nn.Sequential(*trained), x, 4)) == []
    if pending is not None:
        del pending
    else:
        assert unequal(pipeline_step(pipe, x), expected) == []


def run_program(*arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Runs a program of exit_and_fork_programs.py."""
    words = str(HERE / "exit_and_fork_programs.py"), *map(str, arguments)
    return run_python(*words, warning="ignore::DeprecationWarning", timeout=timeout, GPIPE_FAST_PROGRESS="0")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("how", "status"), [("end", 0), ("exit", 3), ("exception", 1)])
def test_the_interpreter_exits_with_pending_graphs(how: str, status: int) -> None:
    """The program returns, calls sys.exit, or raises, while globals hold a pipeline and its graphs."""
    done = run_program("exit", how)
    assert done.returncode == status, done.stderr
    if how == "exception":
        assert done.stderr.endswith("\nLookupError: as planned\n")
        assert done.stderr.count("Traceback") == 1
    else:
        assert done.stderr == ""


@pytest.mark.extended
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("program", "kinds", "count"),
    [
        # A daemon thread at exit: a short step, a slow one, steps of several threads, steps that continue
        # after errors, and a backward that is outside of the pipeline.
        ("daemon", "stops+slow+several+catches+leaving", 2),
        # A stream at exit: open, iterated by a daemon thread, or the copy of the parent's.
        ("streams", "open+daemon+copy", 2),
        # The parent's state at a fork: a new pipeline, a used one, a pending backward, which the child may
        # run, and another thread that computes, is delayed, or traces, in a step.
        ("forks", "new+used+half+computing+delayed", 1),
        pytest.param("forks", "tracing", 3, marks=pytest.mark.soak),
        ("forks_to_end", "delayed", 2),
        ("late", "stream+trace", 4),
        ("forks_within_a_trace", "cached", 20),
        ("forks_within_a_trace", "any", 20),
    ],
)
def test_children_train_and_exit(program: str, kinds: str, count: int, times: int) -> None:
    check_children(program, kinds, count * times)


@pytest.mark.parametrize(
    ("program", "kinds"),
    [
        # A daemon thread begins calls of a stream, or traces, while the interpreter exits.
        ("late", "stream+trace"),
        # A fork while another thread runs a function of a trace, under a lock.
        ("forks_within_a_trace", "cached"),
    ],
)
def test_an_exit_and_a_fork_wait_for_a_trace(program: str, kinds: str) -> None:
    check_children(program, kinds, 3)


def check_children(program: str, kinds: str, count: int) -> None:
    """All children get the parent's bits; they and the parent exit with status 0 and an empty stderr."""
    number = len(kinds.split("+")) * count
    done = run_program(program, kinds, count, timeout=60 + 25 * number)
    assert done.stdout == f"{number} children\n", done.stderr
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a torch built with CUDA")
def test_the_import_asks_no_driver_for_gpus_because_a_child_of_a_fork_could_not_use_them() -> None:
    """NVML tells the number of GPUs, too."""
    program = """
import torch
torch.cuda._device_count_nvml = lambda: 1
def ask():
    raise AssertionError("the driver was asked")
torch._C._cuda_getDeviceCount = ask
import gpipe_fast
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
