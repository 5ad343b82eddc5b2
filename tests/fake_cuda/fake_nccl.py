"""A process group of torch.distributed that orders its transfers on streams, as NCCL does.

A transfer runs on a stream of the group, after the work that is on the caller's current stream; ``wait()``
makes the current stream wait. If the fake runtime defers work, each end of a transfer holds its stream until
the other end has begun or its own end aborts, since NCCL may buffer nothing; else a receive blocks its
caller, which a GPU would not do. The bytes travel by gloo. A transfer that takes longer than the timeout ends
the process, as NCCL's watchdog does.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend

_RUNTIME = ctypes.CDLL(None)
_DEFERS = "FAKE_CUDA_DEFER" in os.environ
# The exit status of a process that the watchdog ends.
TIMED_OUT = 77


class StreamWork(dist.Work):
    """A transfer that is complete at a stream event."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        super().__init__()
        self._device, self._done = stream.device, stream.record_event()

    def synchronize(self) -> None:
        """Blocks until the transfer is complete."""
        self._done.synchronize()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        assert timeout == timedelta(0), "with a timeout, NCCL would block the thread"
        torch.cuda.current_stream(self._device).wait_event(self._done)
        return True


class FakeNccl(Backend):
    """One end of a group of two processes.

    Attributes:
        groups: all of them, in the order in which they were made.
        is_aborted: whether `abort` was called.
    """

    groups: ClassVar[list[FakeNccl]] = []

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        super().__init__(rank, size)
        self._store, self._timeout = store, timeout
        self._thread = ThreadPoolExecutor(1)  # of transfers, in their order
        self._numbers = itertools.count()
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
        self._stream: torch.cuda.Stream | None = None
        self._kept: list[Any] = []
        self.is_aborted = False
        self.groups.append(self)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> StreamWork:
        (source,) = tensors
        host = torch.empty_like(source, device="cpu", pin_memory=True)
        work = self._copy(host, source)
        number = next(self._numbers)
        stream = self._stream_after_current(source.device)
        held = _hold(stream) if _DEFERS else None

        def transfer() -> None:
            try:
                if _DEFERS:
                    work.synchronize()
                self._kept.append((host, self._gloo.send([host], peer, tag)))
                self._store.set(f"sent {number}", "")
                if _DEFERS:
                    self._wait_for(f"received {number}")
            finally:
                if _DEFERS:
                    _release(held)

        self._run(transfer)
        return StreamWork(stream)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> StreamWork:
        (target,) = tensors
        host = torch.empty_like(target, device="cpu", pin_memory=True)
        number = next(self._numbers)
        stream = self._stream_after_current(target.device)
        held = _hold(stream) if _DEFERS else None

        def transfer() -> None:
            try:
                self._store.set(f"received {number}", "")
                self._wait_for(f"sent {number}")
                self._gloo.recv([host], peer, tag).wait()
            finally:
                if _DEFERS:
                    _release(held)

        self._run(transfer)
        return self._copy(target, host)

    def _run(self, transfer: Callable[[], None]) -> None:
        """Runs what transfers bytes: here, or in a thread if it may wait for work of streams."""
        if _DEFERS:
            self._thread.submit(transfer)
        else:
            transfer()

    def _wait_for(self, key: str) -> None:
        end = time.monotonic() + self._timeout
        while not self._store.check([key]):
            if self.is_aborted:
                raise RuntimeError("aborted")
            if time.monotonic() > end:
                os._exit(TIMED_OUT)
            time.sleep(0.001)

    def abort(self) -> None:
        self.is_aborted = True

    def _copy(self, target: Tensor, source: Tensor) -> StreamWork:
        assert target.dtype is source.dtype is torch.uint8
        stream = self._stream_after_current(source.device if source.is_cuda else target.device)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        self._kept.append(StreamWork(stream))
        return self._kept[-1]

    def _stream_after_current(self, device: torch.device) -> torch.cuda.Stream:
        """Returns the stream of the group, after it waits for what is on the current stream."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_event(torch.cuda.current_stream(device).record_event())
        return self._stream


def _hold(stream: torch.cuda.Stream) -> int:
    """Lets later work of a stream wait until `_release` gets what is returned."""
    hold = _RUNTIME.fake_cuda_hold
    hold.argtypes, hold.restype = [ctypes.c_void_p], ctypes.c_void_p
    found: int = hold(stream.cuda_stream)
    return found


def _release(held: int | None) -> None:
    release = _RUNTIME.fake_cuda_release
    release.argtypes, release.restype = [ctypes.c_void_p], None
    release(held)
