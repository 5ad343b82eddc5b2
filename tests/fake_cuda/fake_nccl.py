"""A process group of torch.distributed that orders its transfers on streams, as NCCL does.

A transfer runs on a stream of the group, after the work that is on the caller's current stream; ``wait()``
makes the current stream wait. The fake runtime runs work at once, so a receive blocks its caller until the
tensor is sent or one end aborts, which a GPU would not do. The bytes travel by gloo.
"""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend


class StreamWork(dist.Work):
    """A transfer that is complete at a stream event."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        super().__init__()
        self._device, self._done = stream.device, stream.record_event()

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
        self._store = store
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
        self._kept.append((host, self._gloo.send([host], peer, tag)))
        self._store.set(f"sent {next(self._numbers)}", "")
        return work

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> StreamWork:
        (target,) = tensors
        host = torch.empty_like(target, device="cpu", pin_memory=True)
        sent = f"sent {next(self._numbers)}"
        while not self._store.check([sent]):
            if self._store.check(["aborted"]):
                raise RuntimeError("aborted")
            time.sleep(0.001)
        self._gloo.recv([host], peer, tag).wait()
        return self._copy(target, host)

    def abort(self) -> None:
        self.is_aborted = True
        self._store.set("aborted", "")

    def _copy(self, target: Tensor, source: Tensor) -> StreamWork:
        assert target.dtype is source.dtype is torch.uint8
        device = source.device if source.is_cuda else target.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_event(torch.cuda.current_stream(device).record_event())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._kept.append(StreamWork(self._stream))
        return self._kept[-1]
