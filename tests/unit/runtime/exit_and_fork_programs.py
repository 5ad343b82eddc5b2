"""Programs that test_exit_and_fork.py runs in separate processes; ``PROGRAMS`` lists their names."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FrameType

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.internals import after_pipelines_at_exit, inject_delays, remove_faults
from tests.reference import collect, leaf, loop_step, pipeline, pipeline_step, unequal

K, M = 3, 4
# Longer than any program here takes, and than PyTorch waits for its own threads at exit.
DEADLINE_SECONDS = 60.0


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)),
        *(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)),
    )


def num_threads() -> int:
    """Returns the number of threads of this process."""
    return len(os.listdir("/proc/self/task"))


torch.set_num_threads(1)
warnings.filterwarnings("ignore", message=".* micro-batch(es)? on .* stages leaves? the stages idle")
model = layers()
pipe = GPipe(model, [2, 2, 2], chunks=M)
x = torch.randn(8, 6)
outputs: list[Tensor] = []


def exit_with_pending_graphs(variant: str) -> None:
    """Exits while globals hold a pipeline, an output without backward, and a retained graph."""
    pipe(x).sum().backward()
    outputs.append(pipe(x))
    outputs.append(pipe(x).sum())
    outputs[-1].backward(retain_graph=True)
    if variant == "exception":
        raise LookupError("as planned")
    if variant == "exit":
        sys.exit(3)


def report(children: Iterable[tuple[str, str]]) -> None:
    """Prints each child that failed or wrote to stderr, and the number of children."""
    number = 0
    for number, (kind, problem) in enumerate(children, start=1):
        if problem:
            print(f"{kind}, child {number}: {problem}")
    print(f"{number} children")
    sys.stdout.flush()


def in_child(body: Callable[[], object]) -> str:
    """Runs ``body`` in a forked child that then exits normally; returns its failure or its stderr, or ''."""
    with tempfile.TemporaryFile("w+") as stderr:
        child = os.fork()
        if child == 0:
            os.dup2(stderr.fileno(), 2)
            body()
            sys.exit(0)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                stderr.seek(0)
                printed = stderr.read().strip()
                last = printed.rpartition("\n")[2]
                return f"status {os.waitstatus_to_exitcode(status)}: {last}" if status or printed else ""
            time.sleep(0.01)
        os.kill(child, 9)
        os.waitpid(child, 0)
        return "hangs"


def daemon(variants: str, count: str) -> None:
    """Forks children that exit while a daemon thread of the child trains."""
    pipe(x).sum().backward()
    large = torch.zeros(1 << 20, requires_grad=True)

    def step(variant: str) -> None:
        # When leaving, the backward spends most of its time after the pipeline, before it returns to Python.
        pipe(x + large.sin()[0] if variant == "leaving" else x).sum().backward()

    step("leaving")  # traces

    def steps(variant: str) -> None:
        while True:
            with suppress(RuntimeError if variant == "catches" else ()):
                step(variant)

    def child(variant: str, seconds: float) -> None:
        inject_delays(pipe, 0, 5000 if variant == "slow" else 0)
        for _ in range(3 if variant == "several" else 1):
            threading.Thread(target=steps, args=(variant,), daemon=True).start()
        time.sleep(0.05 + seconds)

    report(
        (variant, in_child(partial(child, variant, 0.0007 * number)))
        for variant in variants.split("+")
        for number in range(int(count))
    )


def traced() -> None:
    """Traces new layers."""
    GPipe(layers(), [2, 2, 2], chunks=M)(x)


def late(variants: str, count: str) -> None:
    """Forks children whose daemon thread begins at exit, after the pipelines are closed.

    It calls new layers, or begins calls of a stream. It runs no operators besides: those of PyTorch abort a
    process that exits meanwhile (pytorch/pytorch#38228).
    """
    pipe.eval()

    def endless() -> Iterator[Tensor]:
        while True:
            yield x

    def child(variant: str) -> None:
        begin, new = threading.Event(), GPipe(layers(), [2, 2, 2], chunks=M)
        stream = pipe.stream(endless(), depth=1 << 30)

        def run() -> None:
            begin.wait()
            next(stream) if variant == "stream" else new(x)

        def begin_and_wait() -> None:
            begin.set()
            time.sleep(0.05)

        threading.Thread(target=run, daemon=True).start()
        after_pipelines_at_exit(begin_and_wait)

    with torch.no_grad():
        pipe(x)
    traced()
    report((variant, in_child(partial(child, variant))) for variant in variants.split("+") * int(count))


initial_state = {name: value.clone() for name, value in model.state_dict().items()}
expected = loop_step(model, x, M)


def check_step(pipe: GPipe) -> None:
    """Checks a step that starts from the initial buffers."""
    model.load_state_dict(initial_state)
    wrong = unequal(pipeline_step(pipe, x), expected)
    assert not wrong, wrong


def check_backward(output: Tensor) -> None:
    result = collect(pipe, leaf(x), output)
    names = [name for name in expected if name.startswith("gradient of")]
    assert not unequal({n: result[n] for n in names}, {n: expected[n] for n in names})


def keep_busy(variant: str) -> None:
    """Starts a thread that runs forwards in a loop: computing, delayed, or tracing each time."""
    inject_delays(pipe, 0, 2000 if variant == "delayed" else 0)

    if variant == "tracing":
        traced()  # imports modules; a fork meanwhile would leave Python's lock of an import held in the child

    def steps() -> None:
        while True:
            traced() if variant == "tracing" else pipe(x)

    threading.Thread(target=steps, daemon=True).start()
    time.sleep(0.1)


def forks(states: str, count: str) -> None:
    """Forks children that train; the parent has a new, used or pending step, or a busy thread."""

    def child(state: str) -> None:
        before = num_threads()
        remove_faults(pipe)
        if state == "half":
            check_backward(outputs[0])
        else:
            check_step(pipe)
            check_step(pipe)
        assert num_threads() == before + K, (num_threads(), before)
        if state == "used":
            check_step(GPipe(model, [4, 2], chunks=M))

    def children() -> Iterator[tuple[str, str]]:
        for state in states.split("+"):
            if state == "half":
                outputs.append(pipeline(pipe, x))
            if state in ("computing", "delayed", "tracing"):
                keep_busy(state)
            for number in range(int(count)):
                time.sleep(0.0003 * number)
                yield state, in_child(partial(child, state))
            if state in ("new", "used", "half"):
                check_step(pipe)  # the parent still works

    report(children())
    os._exit(0)  # even if its thread is busy


def forks_to_end(variant: str, count: str) -> None:
    """Forks children that only exit; another thread of the parent is busy."""
    pipe(x)
    keep_busy(variant)
    report((variant, in_child(lambda: None)) for _ in range(int(count)))
    os._exit(0)


def forks_within_a_trace(kind: str, count: str) -> None:
    """Forks children that train, while another thread of the parent begins some function of a trace.

    The functions are all kinds, or those that run under a lock of Python's cached properties.
    """
    found: dict[CodeType, None] = {}
    locking = functools.cached_property.__get__.__code__

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and (kind == "any" or (frame.f_back and frame.f_back.f_code is locking)):
            found.setdefault(frame.f_code)

    traced()  # imports
    sys.setprofile(note)
    traced()
    sys.setprofile(None)
    functions = itertools.cycle(list(found)[:: max(1, len(found) // int(count))])
    report((function.co_name, fork_at(function)) for function in itertools.islice(functions, int(count)))


def fork_at(function: CodeType) -> str:
    """Forks a child while another thread traces, and pauses where it first calls a function."""
    is_reached = threading.Event()

    def pause(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is function:
            sys.setprofile(None)
            is_reached.set()
            time.sleep(0.2)  # until the other thread has forked, unless that waits for this one

    def trace() -> None:
        sys.setprofile(pause)
        traced()

    thread = threading.Thread(target=trace)
    thread.start()
    is_reached.wait()
    problem = in_child(lambda: check_step(pipe))
    thread.join()
    return problem


streams: list[Iterator[Tensor]] = []


def with_streams(states: str, count: str) -> None:
    """Forks children that have an open stream at exit, or the copy of a stream of the parent."""
    model.eval()
    items = [x] * 5000

    def consume(delay: float) -> None:
        for _ in pipe.stream(items):
            time.sleep(delay)

    def child(state: str, seconds: float) -> None:
        inject_delays(pipe, 0, 2000)
        if state == "daemon":
            threading.Thread(target=consume, args=(seconds,), daemon=True).start()
            time.sleep(0.05 + seconds)
            return
        if state == "copy":
            with suppress(RuntimeError):
                next(streams[0])
                raise AssertionError
            if seconds:
                streams.clear()
        own = pipe.stream(items)
        next(own)
        remove_faults(pipe)
        if state == "copy":
            with torch.no_grad():
                assert torch.equal(next(own), pipe(x))
        streams.append(own)

    def children() -> Iterator[tuple[str, str]]:
        for state in states.split("+"):
            if state == "copy":
                inject_delays(pipe, 0, 2000)
                streams.append(pipe.stream(items, depth=8))
                next(streams[0])
            for number in range(int(count)):
                yield state, in_child(partial(child, state, 0.003 * number))

    with torch.no_grad():
        pipe(x)
    report(children())


PROGRAMS = {
    "exit": exit_with_pending_graphs,
    "daemon": daemon,
    "forks": forks,
    "forks_to_end": forks_to_end,
    "forks_within_a_trace": forks_within_a_trace,
    "late": late,
    "streams": with_streams,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
