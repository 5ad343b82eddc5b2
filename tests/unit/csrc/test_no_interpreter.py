"""Contract 3: actions need no GIL and run no Python, and Python's work does not grow with K or M."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.container import runner_of
from gpipe_fast.reports.recording import Recording
from gpipe_fast.schedule import fill_drain
from tests.internals import native_call, pipeline_of
from tests.reference import gradient_like

pytestmark = pytest.mark.usefixtures("one_thread")

# Calls C functions without releasing the GIL.
C = ctypes.PyDLL(None)

# Splitting a mini-batch into so many micro-batches takes long enough for another thread to acquire the GIL.
M = 500


def layers() -> list[nn.Module]:
    """Returns eight layers, among them some with buffers or random draws."""
    torch.manual_seed(0)
    return [
        *(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.1)),
        *(nn.BatchNorm1d(8), nn.GELU(), nn.AlphaDropout(0.1), nn.Linear(8, 4)),
    ]


def tokens(num_microbatches: int) -> Tensor:
    return torch.randint(0, 11, (2 * num_microbatches,), generator=torch.Generator().manual_seed(1))


def native_calls(
    pipe: GPipe, x: Tensor
) -> tuple[Callable[[], Tensor], Callable[[Tensor], Callable[[], object]]]:
    """Returns forward and backward without the Python around them: both begin by releasing the GIL."""
    arguments, native = native_call(pipe, x), pipeline_of(pipe)

    def forward() -> Tensor:
        (output,), _ = native.forward(*arguments.args, **arguments.kwargs)
        return output

    def backward(output: Tensor) -> Callable[[], object]:
        run = torch.autograd.Variable._execution_engine.run_backward
        gradient = gradient_like(output)
        return lambda: run(
            (output,), (gradient,), True, False, (), allow_unreachable=True, accumulate_grad=True
        )

    return forward, backward


def while_gil_is_held(call: Callable[[], object], seconds: float) -> list[float]:
    """Runs ``call``, which begins by releasing the GIL, while another thread holds the GIL for ``seconds``.

    Returns:
        When the other thread acquired and released the GIL.
    """
    times: list[float] = []
    go = threading.Lock()
    go.acquire()

    def hold() -> None:
        go.acquire()
        times.append(time.monotonic())
        C.usleep(int(seconds * 1e6))
        times.append(time.monotonic())

    holder = threading.Thread(target=hold)
    holder.start()
    with no_thread_switches():
        go.release()
        C.usleep(5000)  # until the holder waits only for the GIL, which only `call` releases
        call()
    holder.join()
    return times


def run_while_gil_is_held(
    pipe: GPipe, call: Callable[[], object], seconds: float
) -> tuple[Recording, list[float]]:
    """Runs ``call`` as `while_gil_is_held`; returns the recording, too."""
    with pipe.recording() as recording:
        times = while_gil_is_held(call, seconds)
    return recording, times


@contextmanager
def no_thread_switches() -> Iterator[None]:
    """Stops the interpreter from switching threads: they release the GIL only explicitly."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def record_without_gil(pipe: GPipe, call: Callable[[], object]) -> Recording:
    """Repeats the call until the other thread acquires the GIL before the first action.

    A call that ends later than it is held may be slow, or need it: it is then held for longer, up to 4 s.
    """
    call()
    seconds = 0.25
    for _ in range(20):
        recording, (acquired, released) = run_while_gil_is_held(pipe, call, seconds)
        begin = min(e.begin for e in recording.latest.values())
        end = max(e.end for e in recording.latest.values())
        if acquired < begin and end < released:
            return recording
        if acquired < begin:
            assert seconds < 4, (acquired, begin, end, released)
            seconds *= 2
    raise AssertionError("no attempt acquired the GIL before the first action began")


@pytest.mark.smoke
def test_actions_need_no_gil() -> None:
    pipe = GPipe(nn.Sequential(*layers()), [2, 3, 3], chunks=M, checkpoint="except_last")
    forward, backward = native_calls(pipe, tokens(M))
    schedule = fill_drain(3, M, recomputed=range(M - 1))
    phases = (("forward", schedule.forward_part(), forward), ("backward", schedule.backward_part(), None))
    for phase, part, call in phases:
        recording = record_without_gil(pipe, call or backward(forward()))
        assert set(recording.latest) == set(part.order()), phase


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved"])
def test_a_whole_step_needs_no_gil(schedule: str) -> None:
    chunks = M // 4
    pipe = GPipe(nn.Sequential(*layers()), [2, 2, 2, 2], chunks=chunks, schedule=schedule)
    pipe.step(tokens(chunks), loss_fn=Tensor.sum, normalizer=1)
    ((longer, *_),) = runner_of(pipe).with_losses.values()
    calls: list[Any] = []

    class Recorder:
        def step(self, *args: Any) -> Any:
            calls.append(args)
            return pipeline_of(pipe).step(*args)

    with mock.patch.object(longer, "pipeline", Recorder()):
        pipe.step(tokens(chunks), loss_fn=Tensor.sum, normalizer=1)
    recording = record_without_gil(pipe, lambda: pipeline_of(pipe).step(*calls[0]))
    assert len(recording.latest) > 8 * chunks


def python_calls(run: Callable[[], object]) -> int:
    """Counts the Python functions that a call runs in its thread; no other thread can, as shown above."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.collect()
    gc.disable()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_the_python_functions_called_by_a_step_do_not_depend_on_its_size() -> None:
    found, x = set(), tokens(8)
    for balance, chunks in (([4, 4], 2), ([2, 2, 2, 2], 8)):
        for schedule in ("1f1b", "zb-h1"):
            pipe = GPipe(nn.Sequential(*layers()), balance, chunks=chunks, schedule=schedule)
            runs = (
                lambda: pipe.step(x, loss_fn=Tensor.sum, normalizer=1),  # noqa: B023
                lambda: pipe(x).sum().backward(),  # noqa: B023
            )
            for run in runs * 2:
                run()
            found.add(tuple(map(python_calls, runs)))
    assert len(found) == 1, found
