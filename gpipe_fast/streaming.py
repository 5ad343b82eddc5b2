"""`GPipe.stream`: inference on many mini-batches that follow one another without draining the pipeline.

The generator reads ahead. With ``depth=2`` it reads two mini-batches before it yields the first result, and
then another one after each result, which the stages compute meanwhile::

    batches   0 1 │   2 │   3 │     │
    stage 0     0   1     2     3
    stage 1         0     1     2     3
    yields        0     1     2     3

An iterable whose mini-batches depend on results yields None where the next one depends on a result in flight.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpipe_fast._extension import InferenceStream
from gpipe_fast.randomness.random import minibatch_key
from gpipe_fast.runtime.planner import PreparedCall
from gpipe_fast.runtime.runner import Runner

if TYPE_CHECKING:
    from gpipe_fast.from_model.pipelined import ModelStream


def check_depth(batches: Any, depth: Any) -> None:
    """Checks the arguments of `stream`.

    Raises:
        TypeError: ``batches`` is a tensor.
        ValueError: ``depth`` is neither a positive integer nor None.
    """
    if isinstance(batches, Tensor):
        raise TypeError(
            f"batches must be an iterable of mini-batches, got a tensor of shape {list(batches.shape)}; "
            "pass [x]"
        )
    if depth is not None and (type(depth) is not int or depth < 1):
        raise ValueError(f"depth must be a positive integer or None, got {depth!r}")


def results(
    stream: CallStream | ModelStream, batches: Iterable[Any], depth: int | None, num_stages: int
) -> Iterator[Any]:
    """Returns a generator of the results of a stream; arguments and errors as of `GPipe.stream`."""
    check_depth(batches, depth)
    return _results(stream, iter(batches), max(2, 2 * num_stages) if depth is None else depth)


def _results(stream: CallStream | ModelStream, batches: Iterator[Any], depth: int) -> Iterator[Any]:
    """Yields the results. In flight are the calls that were begun and not yielded, at most ``depth``."""
    failure, is_exhausted = None, False
    try:
        while True:
            while not is_exhausted and stream.num_in_flight < depth:
                stream.check_unchanged()
                try:
                    batch = next(batches)
                    if batch is None and stream.num_in_flight:  # the next one depends on a result
                        break
                    stream.begin(batch)
                except StopIteration:
                    is_exhausted = True
                except Exception as error:  # of this mini-batch: the results before come first
                    failure, is_exhausted = error, True
            if stream.num_in_flight:
                yield stream.finish()
            elif failure is not None:
                raise failure
            else:
                return
    finally:
        stream.close()
        failure = None  # otherwise its traceback refers to this frame, which refers to it


class CallStream:
    """The calls of a pipeline in flight, whose results come in order."""

    def __init__(self, runner: Runner, is_training: Callable[[], bool]) -> None:
        """Opens a stream of the calls of a runner, which has layers.

        Args:
            runner: the runner.
            is_training: returns whether the model is in train mode.
        """
        self._runner, self._is_training = runner, is_training
        self._native: InferenceStream | None = None
        self._calls: deque[PreparedCall] = deque()
        self._order = _KeyOrder()
        self._num_begun = 0

    @property
    def num_in_flight(self) -> int:
        """The number of calls that were begun and not finished."""
        return len(self._calls)

    def check_unchanged(self) -> None:
        """Checks that no layer in Python has changed what others read; the next call forgets their state."""
        if self._calls:
            self._calls[-1].check_unchanged()

    def begin(self, batch: Any) -> None:
        """Begins the call for a mini-batch."""
        runner = self._runner
        args, kwargs = arguments_in(batch)
        if not runner.planner.is_settled:
            self.wait_for_all()  # so that layers can be traced, which is impossible while they run
        with torch.no_grad():
            inputs = runner.checked_inputs(args, kwargs)
            training = self._is_training()
            runner.choose_balance(inputs, training)
            call = runner.prepared_call(inputs, training)._replace(wait=self.wait_for_all)
            if self._native is None:
                self._pipeline = call.pipeline
                self._native = InferenceStream(call.pipeline)
            elif call.pipeline is not self._pipeline:
                raise RuntimeError(
                    "the stages have got other devices or another transport while a stream is open; open "
                    "another with model.stream()"
                )
            key = call.key(functools.partial(self._order.draw, self._num_begun))
            self._native.push(call.plan.native, inputs.tensors, call.parameters, call.buffers, key)
        self._num_begun += 1
        self._calls.append(call)

    @property
    def runs_python(self) -> bool:
        """Whether layers run in Python, as far as is known."""
        planner = self._runner.planner
        return bool(planner.in_python) or not planner.is_settled

    def wait_for_all(self) -> None:
        """Waits until the calls in flight are complete, or one has failed."""
        if self._native is not None:
            self._native.wait_for_all()

    def finish(self) -> Any:
        """Waits for the oldest call, and returns its result."""
        assert self._native is not None
        outputs, structure = self._native.pop()
        return self._runner.finish(self._calls.popleft(), outputs, structure)

    def close(self) -> None:
        """Cancels the calls in flight."""
        if self._native is not None:
            self._native.close()


class _KeyOrder:
    """Draws the keys of mini-batches, whose order must be that of calls: layers in Python draw them late."""

    def __init__(self) -> None:
        self._latest = -1

    def draw(self, index: int) -> int:
        """Draws the key of the mini-batch with this index, which is called once."""
        if index < self._latest:
            raise RuntimeError(
                f"mini-batch {index} of the stream draws its first random number after mini-batch "
                f"{self._latest} has drawn one, and calls would draw in their order; call model.eval(), or "
                "model(x) for each mini-batch"
            )
        self._latest = index
        return minibatch_key()


def arguments_in(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and keyword arguments of the call for a mini-batch."""
    if isinstance(batch, dict):
        return (), batch
    return (batch if type(batch) is tuple else (batch,)), {}
