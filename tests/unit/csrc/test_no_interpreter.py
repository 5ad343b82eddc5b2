"""Contract 3: the actions need no GIL and run no Python, and Python's work does not grow with K or M."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.runtime.recording import Recording
from gpipe_fast.schedule import fill_drain
from tests.inside import native_call, pipeline_of
from tests.reference import gradient_like

pytestmark = pytest.mark.usefixtures("one_thread")

# Calls C without giving the GIL away.
C = ctypes.PyDLL(None)

# Cutting the mini-batch and handing out the pieces takes a while, in which another thread can get the GIL.
M = 500


@torch.library.custom_op("gpipe_fast_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """An operator whose kernel is Python, for the CPU, as users may have them."""
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, gradient: doubled(gradient))


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return doubled(x)


def layers() -> list[nn.Module]:
    """Eight, with buffers and random draws."""
    torch.manual_seed(0)
    return [
        *(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.1)),
        *(nn.BatchNorm1d(8), nn.GELU(), nn.AlphaDropout(0.1), nn.Linear(8, 4)),
    ]


def tokens(num_microbatches: int) -> Tensor:
    return torch.randint(0, 11, (2 * num_microbatches,), generator=torch.Generator().manual_seed(1))


def calls(pipe: GPipe, x: Tensor) -> tuple[Callable[[], Tensor], Callable[[Tensor], Callable[[], object]]]:
    """Forward and backward without the Python around them: first of all they give the GIL away."""
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
class Held:
    """What was recorded while another thread held the GIL, and from when to when it did; one clock."""

    recording: Recording
    taken: float
    given_back: float

    @property
    def begin(self) -> float:
        return min(e.begin for e in self.recording.latest.values())

    @property
    def end(self) -> float:
        return max(e.end for e in self.recording.latest.values())

    @property
    def no_gil_was_needed(self) -> bool:
        return self.taken < self.begin and self.end < self.given_back


def while_gil_is_held(pipe: GPipe, call: Callable[[], object], seconds: float) -> Held:
    """Calls, while another thread has the GIL from before the first action on and for so many seconds."""
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
        with never_switched():
            go.release()
            C.usleep(5000)  # so that the holder waits for nothing but the GIL, which only `call` gives away
            call()
        holder.join()
    return Held(recording, *times)


@contextmanager
def never_switched() -> Iterator[None]:
    """Threads give the GIL away of themselves only."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def held(pipe: GPipe, call: Callable[[], object], seconds: float = 0.5) -> Held:
    """Tries again if the holder came too late, which says nothing about the pipeline."""
    call()
    for _ in range(10):
        found = while_gil_is_held(pipe, call, seconds)
        if found.taken < found.begin:
            return found
    raise AssertionError("the GIL was never taken before the first action began")


@pytest.mark.smoke
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_actions_need_no_gil(checkpoint: str) -> None:
    pipe, x = GPipe(nn.Sequential(*layers()), [2, 3, 3], chunks=M, checkpoint=checkpoint), tokens(M)
    forward, backward = calls(pipe, x)
    recomputed = range({"always": M, "except_last": M - 1, "never": 0}[checkpoint])
    schedule = fill_drain(3, M, recomputed=recomputed)
    phases = (("forward", schedule.forward_part(), forward), ("backward", schedule.backward_part(), None))
    for phase, part, call in phases:
        found = held(pipe, call or backward(forward()))
        assert set(found.recording.latest) == set(part.order()), phase
        assert found.no_gil_was_needed, (phase, found.taken, found.begin, found.end, found.given_back)


def test_an_operator_in_python_would_be_noticed() -> None:
    """The measure can fail: this stage's program calls back into Python."""
    pipe = GPipe(nn.Sequential(nn.Linear(4, 4), Doubled(), nn.Linear(4, 4)), [1, 2], chunks=M)
    forward, backward = calls(pipe, torch.randn(2 * M, 4))
    for call in (forward, backward(forward())):
        found = held(pipe, call, seconds=0.3)
        assert found.begin < found.given_back < found.end
        assert not found.no_gil_was_needed


needs_monitoring = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="sys.monitoring, which sees all threads, came with Python 3.12"
)
KINDS = ("PY_START", "CALL", "C_RETURN")


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """What the interpreter does in the block, in all threads: frames begun, calls made, C calls ended."""
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


def work_of_a_step(model: Sequence[nn.Module], x: Tensor, balance: list[int], chunks: int) -> Counter[str]:
    """What the interpreter does in one training step, once the programs are there."""
    pipe = GPipe(nn.Sequential(*model), balance, chunks=chunks)
    for _ in range(2):
        pipe(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        with counted() as found:
            pipe(x).sum().backward()
    finally:
        gc.enable()
    return found


@needs_monitoring
@pytest.mark.smoke
def test_python_does_not_grow_with_stages_and_micro_batches() -> None:
    x = tokens(32)
    few = work_of_a_step(layers(), x, [4, 4], chunks=2)
    many = work_of_a_step(layers(), x, [2, 2, 2, 2], chunks=32)
    assert few == many
    assert all(few[kind] > 0 for kind in KINDS)


@needs_monitoring
@pytest.mark.smoke
def test_python_in_a_worker_would_be_counted() -> None:
    """The count can fail: of an operator in Python every call is seen, whatever thread makes it."""
    model = [nn.Linear(4, 4), Doubled(), nn.Linear(4, 4)]
    x = torch.randn(64, 4)
    few, many = (work_of_a_step(model, x, [1, 2], chunks) for chunks in (2, 32))
    assert few["PY_START"] < many["PY_START"]
