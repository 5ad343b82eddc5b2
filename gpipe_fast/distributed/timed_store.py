"""A store of torch.distributed whose calls end: its own never do, if the process that has the keys stops.

While a process does something that may take any length of time, its thread that makes the calls counts in the
store, so that others can tell that from a process that has ended or hangs.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

# By how much a call may exceed the timeout, so that errors of torch.distributed, which say more, come first.
_MARGIN = 1.1
# How often a process that is at work counts, as a part of the timeout.
_BEAT = 0.25


class TimedStore:
    """Has the methods of a store. A thread of its own makes the calls.

    Attributes:
        store: the store.
    """

    def __init__(self, store: Any, timeout: float) -> None:
        """Makes a store.

        Args:
            store: the store of torch.distributed.
            timeout: the maximum time of a call, in seconds.
        """
        self.store, self._timeout = store, timeout
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_stuck = False
        self._at_work: list[str] = []  # the key in which the thread counts, if any
        arguments = self._calls, timeout * _BEAT, store, self._at_work
        threading.Thread(target=_make_calls, args=arguments, daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.store, name)
        return lambda *args: self.call(method, *args)

    @contextlib.contextmanager
    def at_work(self, key: str) -> Iterator[None]:
        """Counts in a key while the block runs, if it takes long."""
        self._at_work.append(key)
        try:
            yield
        finally:
            self._at_work.pop()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns what a function that uses the store returns.

        Raises:
            RuntimeError: it does not end within the timeout, or an earlier one has not.
        """
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._calls.put((function, args, answer))
        try:
            result, error = answer.get(timeout=0.0 if self._is_stuck else self._timeout * _MARGIN)
        except queue.Empty:
            self._is_stuck = True
            raise RuntimeError(
                f"the store of torch.distributed has not answered for {self._timeout} s: the process that "
                "has it, that of rank 0 or torchrun, hangs or cannot be reached; start all processes again"
            ) from None
        if isinstance(error, dist.DistNetworkError):
            raise RuntimeError(
                "the store of torch.distributed is lost: the process that has it, that of rank 0 or "
                f"torchrun, has ended; start all processes again: {error}"
            ) from error
        if error is not None:
            raise error
        return result


def _make_calls(calls: queue.SimpleQueue[Any], beat: float, store: Any, at_work: list[str]) -> None:
    while True:
        try:
            call = calls.get(timeout=beat)
        except queue.Empty:
            for key in at_work:
                with contextlib.suppress(RuntimeError):  # which the next call raises
                    store.add(key, 1)
            continue
        if call is None:
            return
        function, args, answer = call
        try:
            answer.put((function(*args), None))
        except BaseException as error:
            answer.put((None, error))
        del call, function, args, answer
