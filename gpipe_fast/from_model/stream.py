"""Streams of pipelined models: each mini-batch may need another program, whose pipeline is another, too."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gpipe_fast.from_model.calls import Calls
from gpipe_fast.from_model.program import Program
from gpipe_fast.streaming import CallStream, arguments_of


class ModelStream:
    """The calls of a pipelined model in flight; methods as of `gpipe_fast.streaming.OpenStream`."""

    def __init__(self, calls: Calls, plain: Callable[[], nn.Module]) -> None:
        """Opens a stream of the calls of a model; ``plain`` returns the plain model."""
        self._calls, self._plain = calls, plain
        self._program: Program | None = None  # of the calls in flight
        self._stream: CallStream | None = None
        self._given: deque[tuple[Any, Any, Any]] = deque()  # arguments of the calls in flight
        self._finished: deque[Any] = deque()  # results of earlier programs

    @property
    def num_in_flight(self) -> int:
        """As for `OpenStream`."""
        return len(self._finished) + len(self._given)

    def check_unchanged(self) -> None:
        """As for `OpenStream`."""
        if self._stream is not None:
            self._stream.check_unchanged()

    def begin(self, batch: Any) -> None:
        """As for `OpenStream`. If another program is needed, first waits for the calls of the one before."""
        if self._stream is not None and self._stream.runs_python:
            self._stream.wait_for_all()  # blocks in Python cannot run while the model is recorded
        with torch.no_grad():
            program, given = self._calls.begin(self._plain(), *arguments_of(batch))
            if program is not self._program or self._stream is None:
                while self._given:
                    self._finished.append(self._finish_one())
                self.close()
                self._program, self._stream = program, CallStream(program.pipeline)
            self._stream.begin((program.argument(given[0]),))
            self._calls.end(program)
        self._given.append(given)

    def finish(self) -> Any:
        """As for `OpenStream`."""
        return self._finished.popleft() if self._finished else self._finish_one()

    def _finish_one(self) -> Any:
        assert self._stream is not None
        assert self._program is not None
        given = self._given.popleft()
        outputs = self._stream.finish()
        with torch.no_grad():
            return self._program.combined(outputs, *given)

    def close(self) -> None:
        """As for `OpenStream`."""
        if self._stream is not None:
            self._stream.close()
