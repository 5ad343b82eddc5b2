"""Contract 3: actions need no GIL and run no Python, and Python's work does not grow with K or M."""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.reports.recording import Recording
from gpipe_fast.schedule import fill_drain
from tests.internals import native_call, pipeline_of
from tests.reference import gradient_like

pytestmark = pytest.mark.usefixtures("one_thread")

# Calls C functions without releasing the GIL.
C = ctypes.PyDLL(None)

# Splitting a mini-batch into so many micro-batches takes long enough for another thread to acquire the GIL.
M = 500


@torch.library.custom_op("gpipe_fast_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """An operator whose CPU kernel is in Python, as users may define it."""
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, gradient: doubled(gradient))


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return doubled(x)


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


@dataclass
class GilHeldRun:
    """A recording made while another thread held the GIL, and when that thread acquired and released it."""

    recording: Recording
    acquired: float
    released: float

    @property
    def begin(self) -> float:
        return min(e.begin for e in self.recording.latest.values())

    @property
    def end(self) -> float:
        return max(e.end for e in self.recording.latest.values())

    @property
    def needed_no_gil(self) -> bool:
        return self.acquired < self.begin and self.end < self.released


def run_while_gil_is_held(pipe: GPipe, call: Callable[[], object], seconds: float) -> GilHeldRun:
    """Runs ``call`` while another thread holds the GIL for ``seconds``, from before the first action."""
    times: list[float] = []
    go = threading.Lock()
    go.acquire()

    def hold() -> None:
        go.acquire()
        times.append(time.monotonic())
        C.usleep(int(seconds * 1e6))
        times.append(time.monotonic())

    with pipe.recording() as recording:
        holder = threading.Thread(target=hold)
        holder.start()
        with no_thread_switches():
            go.release()
            C.usleep(5000)  # until the holder waits only for the GIL, which only `call` releases
            call()
        holder.join()
    return GilHeldRun(recording, *times)


@contextmanager
def no_thread_switches() -> Iterator[None]:
    """Stops the interpreter from switching threads: they release the GIL only explicitly."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def run_until_gil_is_held(pipe: GPipe, call: Callable[[], object], seconds: float = 0.5) -> GilHeldRun:
    """Repeats the call until the other thread acquires the GIL before the first action.

    A call that ends later than it is held may be slow, or need it: it is then held for longer, up to 8 times.
    """
    call()
    longest = 8 * seconds
    for _ in range(20):
        found = run_while_gil_is_held(pipe, call, seconds)
        if found.acquired < found.begin:
            if found.needed_no_gil or seconds >= longest:
                return found
            seconds *= 2
    raise AssertionError("no attempt acquired the GIL before the first action began")


@pytest.mark.smoke
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_actions_need_no_gil(checkpoint: str) -> None:
    pipe, x = GPipe(nn.Sequential(*layers()), [2, 3, 3], chunks=M, checkpoint=checkpoint), tokens(M)
    forward, backward = native_calls(pipe, x)
    recomputed = range({"always": M, "except_last": M - 1, "never": 0}[checkpoint])
    schedule = fill_drain(3, M, recomputed=recomputed)
    phases = (("forward", schedule.forward_part(), forward), ("backward", schedule.backward_part(), None))
    for phase, part, call in phases:
        found = run_until_gil_is_held(pipe, call or backward(forward()))
        assert set(found.recording.latest) == set(part.order()), phase
        assert found.needed_no_gil, (phase, found.acquired, found.begin, found.end, found.released)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved"])
def test_a_whole_step_needs_no_gil(schedule: str) -> None:
    chunks = M // 4
    pipe = GPipe(nn.Sequential(*layers()), [2, 2, 2, 2], chunks=chunks, schedule=schedule)
    pipe.step(tokens(chunks), loss_fn=Tensor.sum, normalizer=1)
    ((trainer, *_),) = pipe._trainers.values()
    calls: list[Any] = []

    class Recorder:
        def step(self, *args: Any) -> Any:
            calls.append(args)
            return pipeline_of(pipe).step(*args)

    with mock.patch.object(trainer, "_pipeline", Recorder()):
        pipe.step(tokens(chunks), loss_fn=Tensor.sum, normalizer=1)
    found = run_until_gil_is_held(pipe, lambda: pipeline_of(pipe).step(*calls[0]))
    assert len(found.recording.latest) > 8 * chunks
    assert found.needed_no_gil, (found.acquired, found.begin, found.end, found.released)


def test_the_python_functions_called_by_a_step_do_not_depend_on_its_size() -> None:
    found = set()
    for balance, chunks in itertools.product([[4, 4], [2, 2, 2, 2]], [2, 8]):
        for schedule in ("1f1b", "zb-h1"):
            pipe = GPipe(nn.Sequential(*layers()), balance, chunks=chunks, schedule=schedule)
            x = tokens(8)
            for _ in range(3):
                pipe.step(x, loss_fn=Tensor.sum, normalizer=1)
            count = 0

            def profile(frame: Any, event: str, argument: Any) -> None:
                nonlocal count
                count += event == "call"

            gc.disable()
            sys.setprofile(profile)
            try:
                pipe.step(x, loss_fn=Tensor.sum, normalizer=1)
            finally:
                sys.setprofile(None)
                gc.enable()
            found.add(count)
    assert len(found) == 1, found


def test_a_python_operator_is_seen_to_need_the_gil() -> None:
    """Negative control: this stage's program calls back into Python."""
    pipe = GPipe(nn.Sequential(nn.Linear(4, 4), Doubled(), nn.Linear(4, 4)), [1, 2], chunks=M)
    forward, backward = native_calls(pipe, torch.randn(2 * M, 4))
    for call in (forward, backward(forward())):
        found = run_until_gil_is_held(pipe, call, seconds=0.3)
        assert found.begin < found.released < found.end
        assert not found.needed_no_gil


needs_monitoring = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="needs sys.monitoring (Python 3.12), which sees all threads"
)
KINDS = ("PY_START", "CALL", "C_RETURN")


@contextmanager
def counting_events() -> Iterator[Counter[str]]:
    """Counts, in all threads, the frames begun, calls made and C calls ended in the block."""
    monitoring = sys.monitoring  # type: ignore[attr-defined]
    tool, found = monitoring.PROFILER_ID, Counter[str]()
    monitoring.use_tool_id(tool, "gpipe_fast tests")
    for kind in KINDS:
        count = partial(found.update, [kind])
        monitoring.register_callback(tool, getattr(monitoring.events, kind), lambda *_, count=count: count())
    monitoring.set_events(tool, monitoring.events.PY_START | monitoring.events.CALL)  # C_RETURN with CALL
    try:
        yield found
    finally:
        monitoring.set_events(tool, 0)
        for kind in KINDS:
            monitoring.register_callback(tool, getattr(monitoring.events, kind), None)
        monitoring.free_tool_id(tool)


def events_of_a_step(model: Sequence[nn.Module], x: Tensor, balance: list[int], chunks: int) -> Counter[str]:
    """Counts the interpreter's events in one training step of a compiled pipeline."""
    pipe = GPipe(nn.Sequential(*model), balance, chunks=chunks)
    for _ in range(2):
        pipe(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        with counting_events() as found:
            pipe(x).sum().backward()
    finally:
        gc.enable()
    return found


@needs_monitoring
@pytest.mark.smoke
def test_python_work_does_not_grow_with_stages_and_micro_batches() -> None:
    x = tokens(32)
    few = events_of_a_step(layers(), x, [4, 4], chunks=2)
    many = events_of_a_step(layers(), x, [2, 2, 2, 2], chunks=32)
    assert few == many
    assert all(few[kind] > 0 for kind in KINDS)


@needs_monitoring
@pytest.mark.smoke
def test_python_operators_in_workers_are_counted() -> None:
    """Negative control: every call of a Python operator is counted, in any thread."""
    model = [nn.Linear(4, 4), Doubled(), nn.Linear(4, 4)]
    x = torch.randn(64, 4)
    few, many = (events_of_a_step(model, x, [1, 2], chunks) for chunks in (2, 32))
    assert few["PY_START"] < many["PY_START"]
