"""Ctrl-C ends a slow step at once and changes nothing; after a handler that does not raise, it continues."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast._extension import kept_bytes
from tests.internals import inject_delays, pipeline_of, remove_faults
from tests.reference import Result, collect, gradient_like, leaf, loop_step, pipeline, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")

# Maximum time from the signal to the exception.
MAX_SECONDS = 0.1
M = 1000


class SlowPipeline:
    """A pipeline whose steps take some hundred milliseconds: thousands of matrix products of 30 µs each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(96, 96), nn.ReLU()) for _ in range(7)]
        self.model = nn.Sequential(*layers[:4], nn.BatchNorm1d(96), *layers[4:], nn.Dropout(0.1))
        self.pipe = GPipe(self.model, [4, 5], chunks=M, checkpoint="always")
        self.x = torch.randn(96 * M, 96)
        self.initial_state = {name: value.clone() for name, value in self.pipe.state_dict().items()}
        self.expected: Result = loop_step(self.model, self.x, M)
        self.next_step_is_correct()  # traces
        # Seconds after the start of a forward at which it is well in progress; a backward takes longer.
        ends = [time.monotonic()]
        for _ in range(3):
            self.pipe(self.x)
            ends.append(time.monotonic())
        self.signal_delay = min(b - a for a, b in itertools.pairwise(ends)) / 4

    def reset(self) -> None:
        self.pipe.load_state_dict(self.initial_state)
        self.pipe.zero_grad()
        self.pipe.checkpoint = "always"

    def next_step_is_correct(self) -> bool:
        self.reset()
        return unequal(pipeline_step(self.pipe, self.x), self.expected) == []

    def state(self) -> Result:
        state: Result = {name: value.clone() for name, value in self.pipe.state_dict().items()}
        parameters = self.pipe.named_parameters()
        return state | {f"gradient of {n}": None if p.grad is None else p.grad.clone() for n, p in parameters}

    def num_batches_since(self, before: Result) -> int:
        """Returns how many micro-batches the batch norm has counted since a state."""
        name = "4.num_batches_tracked"
        now, then = self.pipe.state_dict()[name], before[name]
        assert then is not None
        return int(now - then)


@pytest.fixture(scope="module")
def slow() -> Iterator[SlowPipeline]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield SlowPipeline()
    torch.set_num_threads(before)


class InterruptedCall:
    """A call during which this process receives SIGINT, ``after`` seconds after its start.

    Attributes:
        seconds: time from the signal to the ``KeyboardInterrupt`` that ended the call.
        finished: whether the call returned instead.
        sent: time of the signal, by ``time.monotonic()``.
        end: time at which the call returned.
    """

    def __init__(self, call: Callable[[], object], after: float) -> None:
        self.finished = False
        thread = threading.Thread(target=self._send, args=(after,))
        try:
            thread.start()
            call()
            self.end = time.monotonic()
            self.finished = True
            thread.join()  # a signal that is sent too late arrives here
        except KeyboardInterrupt:
            self.seconds = time.monotonic() - self.sent
            thread.join()

    def _send(self, after: float) -> None:
        time.sleep(after)
        self.sent = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def sigint_handler(action: Callable[[], object]) -> Iterator[None]:
    """Makes SIGINT call ``action`` in the block."""

    def handler(_signal: int, _frame: FrameType | None) -> None:
        action()

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Step:
    """A training step in two halves: forward and backward."""

    def __init__(self, slow: SlowPipeline) -> None:
        slow.reset()
        self.slow, self.x = slow, leaf(slow.x)

    def forward(self) -> None:
        self.output = pipeline(self.slow.pipe, self.x)
        self.gradient = gradient_like(self.output)

    def backward(self) -> None:
        self.output.backward(self.gradient)

    def run(self, interrupted_half: str, interrupt: Callable[[Callable[[], object]], object]) -> bool:
        """Runs a step, one half of it through ``interrupt``; returns whether its results are correct."""
        for half in ("forward", "backward"):
            call = getattr(self, half)
            interrupt(call) if half == interrupted_half else call()
        output = self.output.detach()  # collect() must not run the backward again
        return unequal(collect(self.slow.pipe, self.x, output), self.slow.expected) == []


in_both_halves = pytest.mark.parametrize("half", ["forward", "backward"])


def fastest_interrupt(slow: SlowPipeline, attempt: Callable[[float], InterruptedCall]) -> float:
    """Returns the shortest ``seconds`` of three interrupted calls, as other processes may use the cores.

    ``attempt`` gets ``after``, which is halved after each step that finished before the signal.
    """
    after, found = slow.signal_delay, list[float]()
    for _ in range(12):
        interrupted = attempt(after)
        if interrupted.finished:
            after /= 2
        else:
            found.append(interrupted.seconds)
        if len(found) == 3:
            return min(found)
    raise AssertionError("the step finished before the signal, or ignored it")


def test_sigint_ends_a_forward(slow: SlowPipeline) -> None:
    def attempt(after: float) -> InterruptedCall:
        before = slow.state()
        interrupted = InterruptedCall(lambda: slow.pipe(slow.x), after)
        # The forward may have ended just before the signal.
        interrupted.finished |= slow.num_batches_since(before) == M
        assert interrupted.finished or unequal(slow.state(), before) == []
        return interrupted

    assert fastest_interrupt(slow, attempt) < MAX_SECONDS
    assert slow.next_step_is_correct()


def test_sigint_ends_a_backward(slow: SlowPipeline) -> None:
    def forward() -> torch.Tensor:
        slow.reset()
        for parameter in slow.pipe.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.manual_seed(0)
        return slow.pipe(slow.x)

    output = forward()
    gradient = gradient_like(output)
    output.backward(gradient)
    whole = slow.state()

    def attempt(after: float) -> InterruptedCall:
        output = forward()
        before = slow.state()
        interrupted = InterruptedCall(lambda: output.backward(gradient), after)
        # The backward may have ended just before the signal.
        interrupted.finished |= unequal(slow.state(), whole) == []
        if not interrupted.finished:
            assert unequal(slow.state(), before) == []
            assert kept_bytes(output) == 0
            with pytest.raises(RuntimeError, match="for a second backward, pass retain_graph=True"):
                output.backward(gradient)
        return interrupted

    assert fastest_interrupt(slow, attempt) < MAX_SECONDS
    assert slow.next_step_is_correct()


@in_both_halves
def test_the_step_continues_after_a_handler_that_does_not_raise(slow: SlowPipeline, half: str) -> None:
    handled = []

    def interrupt(call: Callable[[], object]) -> None:
        interrupted = InterruptedCall(call, slow.signal_delay)
        assert interrupted.finished
        (at,) = handled
        assert interrupted.sent < at < interrupted.end - 0.02

    with sigint_handler(lambda: handled.append(time.monotonic())):
        assert Step(slow).run(half, interrupt)


def test_a_handler_may_call_another_pipeline_but_not_the_interrupted_one(slow: SlowPipeline) -> None:
    """The call would wait for itself. Instead, it raises, and the interrupted step continues."""
    step, found = Step(slow), []
    other = slow.pipe.eval()(slow.x)
    slow.pipe.train()
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(8, 4)

    @torch.enable_grad()  # a backward calls the handler in grad mode off, as it calls hooks
    def handler() -> None:
        for call in (
            lambda: slow.pipe(slow.x),
            lambda: other.backward(torch.ones_like(other)),
            lambda: pipeline_of(slow.pipe).record(0),
        ):
            with pytest.raises(RuntimeError, match="a pipeline was called from within its own run"):
                call()
        found.append(pipeline_step(GPipe(model, [2, 1], chunks=2), x))

    with sigint_handler(handler):
        assert step.run("backward", lambda call: InterruptedCall(call, slow.signal_delay))
    assert [unequal(result, loop_step(model, x, 2)) for result in found] == [[]]
    assert kept_bytes(other) > 0


@in_both_halves
def test_an_error_in_the_handler_ends_the_step(slow: SlowPipeline, half: str) -> None:
    """The error is unchanged and has the handler's frame in its traceback."""
    step = Step(slow)
    if half == "backward":
        step.forward()
    before = slow.state()
    with (
        sigint_handler(lambda: slow.pipe(slow.x)),
        pytest.raises(RuntimeError, match="a pipeline was called from within its own run") as caught,
    ):
        InterruptedCall(getattr(step, half), slow.signal_delay)
    assert "handler" in [entry.name for entry in caught.traceback]
    assert unequal(slow.state(), before) == []
    assert slow.next_step_is_correct()


def test_calls_from_other_threads_are_not_interrupted(slow: SlowPipeline) -> None:
    """Python handles signals in the main thread: its wait ends, and the other thread's step continues."""

    def interrupt(call: Callable[[], object]) -> None:
        ended = threading.Event()

        def run_call() -> None:
            call()
            ended.set()

        threading.Thread(target=run_call).start()
        interrupted = InterruptedCall(lambda: ended.wait(60), slow.signal_delay)
        assert not interrupted.finished
        assert not ended.is_set()
        assert interrupted.seconds < MAX_SECONDS
        assert ended.wait(60)

    assert Step(slow).run("backward", interrupt)


@pytest.mark.parametrize("raises", [True, False])
def test_the_wait_for_another_threads_forward_can_be_interrupted(slow: SlowPipeline, raises: bool) -> None:
    """Mini-batches of a pipeline run one at a time; a handler may call it, because its thread waits."""
    slow.reset()
    slow.pipe.eval()
    x, outputs, ended = slow.x[: 2 * M], [], threading.Event()
    expected = slow.pipe(x)
    inject_delays(slow.pipe, seed=0, max_delay_us=2_000)

    def long_step() -> None:
        slow.pipe(x)
        ended.set()

    def handler() -> None:
        if raises:
            raise KeyboardInterrupt
        outputs.append(slow.pipe(x))

    threading.Thread(target=long_step).start()
    time.sleep(0.1)
    with sigint_handler(handler):
        interrupted = InterruptedCall(lambda: outputs.append(slow.pipe(x)), 0.1)
        assert ended.is_set() != raises
    assert ended.wait(60)
    remove_faults(slow.pipe)
    slow.pipe.train()
    assert interrupted.finished != raises
    if raises:
        assert interrupted.seconds < MAX_SECONDS
    else:
        assert [torch.equal(output, expected) for output in outputs] == [True, True]
