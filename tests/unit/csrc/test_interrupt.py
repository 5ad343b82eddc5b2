"""Ctrl-C: ends a long step at once and leaves nothing behind; signals that do not raise change nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast._extension import kept_bytes
from tests.inside import delay, disturb_no_more, pipeline_of
from tests.reference import Result, collect, gradient_like, leaf, loop_step, pipeline, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")

# From the signal to the exception.
LONGEST = 0.1
M = 1000


class Long:
    """Steps of some hundred milliseconds, of thousands of matrix products of 30 µs each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(96, 96), nn.ReLU()) for _ in range(7)]
        self.model = nn.Sequential(*layers[:4], nn.BatchNorm1d(96), *layers[4:], nn.Dropout(0.1))
        self.pipe = GPipe(self.model, [4, 5], chunks=M, checkpoint="always")
        self.x = torch.randn(96 * M, 96)
        self.start = {name: value.clone() for name, value in self.pipe.state_dict().items()}
        self.expected: Result = loop_step(self.model, self.x, M)
        self.next_step_is_right()  # traces
        # Seconds after its begin at which a forward, or a backward, which takes longer, is well under way.
        self.early = min(self._seconds_of_a_forward() for _ in range(3)) / 4

    def _seconds_of_a_forward(self) -> float:
        begin = time.monotonic()
        self.pipe(self.x)
        return time.monotonic() - begin

    def start_again(self) -> None:
        self.pipe.load_state_dict(self.start)
        self.pipe.zero_grad()
        self.pipe.checkpoint = "always"

    def next_step_is_right(self) -> bool:
        self.start_again()
        return unequal(pipeline_step(self.pipe, self.x), self.expected) == []

    def state(self) -> Result:
        state: Result = {name: value.clone() for name, value in self.pipe.state_dict().items()}
        state |= {
            f"gradient of {name}": None if p.grad is None else p.grad.clone()
            for name, p in self.pipe.named_parameters()
        }
        return state


@pytest.fixture(scope="module")
def long() -> Iterator[Long]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Long()
    torch.set_num_threads(before)


class Interrupted:
    """One signal to this process after ``delay`` seconds, while ``call`` runs.

    Attributes:
        seconds: from the signal to the ``KeyboardInterrupt`` that ended the call.
        finished: whether the call ended by itself instead.
        sent: when, on the clock of ``time.monotonic()``.
        end: when the call ended by itself.
    """

    def __init__(self, call: Callable[[], object], delay: float) -> None:
        self.finished = False
        thread = threading.Thread(target=self._send, args=(delay,))
        try:
            thread.start()
            call()
            self.end = time.monotonic()
            self.finished = True
            thread.join()  # where a signal arrives that comes too late
        except KeyboardInterrupt:
            self.seconds = time.monotonic() - self.sent
            thread.join()

    def _send(self, delay: float) -> None:
        time.sleep(delay)
        self.sent = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def handling(action: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C does this in the block."""

    def handler(_signal: int, _frame: FrameType | None) -> None:
        action()

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Step:
    """One training step, in two halves."""

    def __init__(self, long: Long) -> None:
        long.start_again()
        self.long, self.x = long, leaf(long.x)

    def forward(self) -> None:
        self.output = pipeline(self.long.pipe, self.x)
        self.gradient = gradient_like(self.output)

    def backward(self) -> None:
        self.output.backward(self.gradient)

    def run(self, disturbed: str, disturb: Callable[[Callable[[], object]], object]) -> bool:
        """Whether the step is right if one of its halves is called by ``disturb``."""
        for half in ("forward", "backward"):
            call = getattr(self, half)
            disturb(call) if half == disturbed else call()
        output = self.output.detach()  # nothing is left to be run backward
        return unequal(collect(self.long.pipe, self.x, output), self.long.expected) == []


halves = pytest.mark.parametrize("half", ["forward", "backward"])


def soonest(long: Long, attempt: Callable[[float], Interrupted]) -> float:
    """Seconds, best of three: whether another process has the cores is not what is asked here.

    ``attempt`` is given a delay, a shorter one after a step that was over before the signal came.
    """
    delay, found = long.early, list[float]()
    for _ in range(12):
        interrupted = attempt(delay)
        if interrupted.finished:
            delay /= 2
        else:
            found.append(interrupted.seconds)
        if len(found) == 3:
            return min(found)
    raise AssertionError("the step was over before the signal came, or did not heed it")


def test_ends_a_forward(long: Long) -> None:
    def attempt(delay: float) -> Interrupted:
        before = long.state()
        interrupted = Interrupted(lambda: long.pipe(long.x), delay)
        assert interrupted.finished or unequal(long.state(), before) == []
        return interrupted

    assert soonest(long, attempt) < LONGEST
    assert long.next_step_is_right()


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_ends_a_backward(long: Long, checkpoint: str) -> None:
    long.pipe.checkpoint = checkpoint
    for parameter in long.pipe.parameters():
        parameter.grad = torch.ones_like(parameter)

    def attempt(delay: float) -> Interrupted:
        output = long.pipe(long.x)
        before, gradient = long.state(), gradient_like(output)
        interrupted = Interrupted(lambda: output.backward(gradient), delay)
        if not interrupted.finished:
            assert unequal(long.state(), before) == []
            assert kept_bytes(output) == 0
            with pytest.raises(RuntimeError, match="a second backward needs retain_graph=True"):
                output.backward(gradient)
        return interrupted

    assert soonest(long, attempt) < LONGEST
    assert long.next_step_is_right()


def test_an_interrupted_backward_that_retains_can_be_repeated(long: Long) -> None:
    step = Step(long)
    step.forward()
    interrupted = Interrupted(lambda: step.output.backward(step.gradient, retain_graph=True), long.early)
    assert not interrupted.finished
    assert step.x.grad is None
    step.backward()
    assert unequal(collect(long.pipe, step.x, step.output.detach()), long.expected) == []


def test_the_measure_can_fail() -> None:
    """A call that does not look for signals, though it lets other threads run."""
    large = torch.ones(4000, 4000)
    deaf = Interrupted(lambda: large @ large, 0.1)
    assert deaf.finished or deaf.seconds > LONGEST
    assert Interrupted(lambda: None, 0.05).finished


@halves
def test_a_handler_that_does_not_raise_lets_the_step_go_on(long: Long, half: str) -> None:
    handled = []

    def disturb(call: Callable[[], object]) -> None:
        interrupted = Interrupted(call, long.early)
        assert interrupted.finished
        (at,) = handled
        assert interrupted.sent < at < interrupted.end - 0.02

    with handling(lambda: handled.append(time.monotonic())):
        assert Step(long).run(half, disturb)


@halves
def test_a_handler_cannot_call_the_same_pipeline(long: Long, half: str) -> None:
    """It would wait for itself: a clear error instead, and the step that it interrupted goes on."""
    step, errors = Step(long), []
    other = long.pipe.eval()(long.x)
    long.pipe.train()
    calls = {
        "forward": lambda: long.pipe(long.x),
        "backward": lambda: other.backward(torch.ones_like(other)),
        "record": lambda: pipeline_of(long.pipe).record(0),
    }

    def handler() -> None:
        for call in calls.values():
            with pytest.raises(RuntimeError, match="a pipeline was called from within its own run") as caught:
                call()
            errors.append(caught)

    with handling(handler):
        assert step.run(half, lambda call: Interrupted(call, long.early))
    assert len(errors) == len(calls)
    assert kept_bytes(other) > 0


@halves
def test_an_error_in_a_handler_ends_the_step(long: Long, half: str) -> None:
    """As it is, with the handler's frame in its traceback."""
    step = Step(long)
    if half == "backward":
        step.forward()
    before = long.state()
    with (
        handling(lambda: long.pipe(long.x)),
        pytest.raises(RuntimeError, match="a pipeline was called from within its own run") as caught,
    ):
        Interrupted(getattr(step, half), long.early)
    assert "handler" in [entry.name for entry in caught.traceback]
    assert unequal(long.state(), before) == []
    assert long.next_step_is_right()


@halves
def test_a_handler_may_use_autograd_and_another_pipeline(long: Long, half: str) -> None:
    """As it could between two lines of Python; in a backward it finds autograd's mode off, as hooks do."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(8, 4)
    expected, found = loop_step(model, x, 2), []

    @torch.enable_grad()
    def handler() -> None:
        found.append(loop_step(model, x, 2))
        found.append(pipeline_step(GPipe(model, [2, 1], chunks=2), x))

    with handling(handler):
        assert Step(long).run(half, lambda call: Interrupted(call, long.early))
    assert [unequal(ours, expected) for ours in found] == [[], []]


@halves
def test_calls_from_other_threads_are_not_interrupted(long: Long, half: str) -> None:
    """Signals are the main thread's: that one's wait ends, and the step goes on."""

    def disturb(call: Callable[[], object]) -> None:
        ended = threading.Event()

        def in_thread() -> None:
            call()
            ended.set()

        threading.Thread(target=in_thread).start()
        interrupted = Interrupted(lambda: ended.wait(60), long.early)
        assert not interrupted.finished
        assert not ended.is_set()
        assert interrupted.seconds < LONGEST
        assert ended.wait(60)

    assert Step(long).run(half, disturb)


@contextmanager
def another_thread_steps(long: Long, x: Tensor) -> Iterator[threading.Event]:
    """A thread whose forward is under way, for most of a second, when the block begins; set at its end."""
    long.start_again()
    long.pipe(x)
    delay(long.pipe, seed=0, longest_us=2_000)
    ended = threading.Event()

    def step() -> None:
        long.pipe(x)
        ended.set()

    threading.Thread(target=step).start()
    time.sleep(0.1)
    try:
        yield ended
    finally:
        ended.wait(60)
        disturb_no_more(long.pipe)


def test_ends_the_wait_for_another_threads_step(long: Long) -> None:
    """Mini-batches of one pipeline take turns; whoever waits for the turn can be interrupted too."""
    x = long.x[: 2 * M]
    with another_thread_steps(long, x) as ended:
        interrupted = Interrupted(lambda: long.pipe(x), 0.1)
        assert not ended.is_set()
    assert not interrupted.finished
    assert interrupted.seconds < LONGEST


def test_a_handler_may_call_the_pipeline_while_its_thread_waits_for_the_turn(long: Long) -> None:
    """Nothing of its own is under way: both wait."""
    x, outputs = long.x[: 2 * M], []
    long.start_again()
    long.pipe.eval()
    expected = long.pipe(x)
    with another_thread_steps(long, x) as ended, handling(lambda: outputs.append(long.pipe(x))):
        interrupted = Interrupted(lambda: outputs.append(long.pipe(x)), 0.1)
        assert ended.is_set()
    assert interrupted.finished
    assert interrupted.sent < interrupted.end - 0.1
    assert [torch.equal(output, expected) for output in outputs] == [True, True]
    long.pipe.train()
