"""A process group of torch.distributed that orders its transfers on streams, as NCCL does.

A transfer runs on a stream of the group, after the work that is on the caller's current stream; ``wait()``
makes the current stream wait. If the fake runtime defers work, each end of a transfer holds its stream until
the other end has begun or its own end aborts, since NCCL may buffer nothing; else a receive blocks its
caller, which a GPU would not do. The bytes travel by gloo. A transfer that takes longer than the timeout ends
the process, as NCCL's watchdog does.
"""

from __future__ import annotations

import ctypes
import functools
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
    """One end of a group: transfers are between two processes, collectives between all.

    Attributes:
        groups: all of them, in the order in which they were made.
        is_aborted: whether `abort` was called.
    """

    groups: ClassVar[list[FakeNccl]] = []

    def __init__(
        self, store: Any, rank: int, size: int, timeout: float, max_blocks: int | None = None
    ) -> None:
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

    # The names are those that C++ calls, for `allgather_into_tensor_coalesced` and the like.

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> StreamWork:
        reduce = options.reduceOp if options is not None else dist.ReduceOp.SUM
        return self._collective(tensors[0], tensors[0], lambda all_: _reduced(all_, reduce))

    def all_gather_single(self, output: Tensor, given: Tensor, options: Any = None) -> StreamWork:
        return self._collective(given, output, lambda all_: all_.view(output.shape))

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> StreamWork:
        return self.all_gather_single(*outputs, *inputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any
    ) -> StreamWork:
        (output,), (given,) = outputs, inputs

        def own_part(all_: Tensor) -> Tensor:
            return _reduced(all_, options.reduceOp).view(self.size(), *output.shape)[self.rank()]

        return self._collective(given, output, own_part)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, to: list[int], from_: list[int], options: Any = None
    ) -> StreamWork:
        assert not to, "only equal parts"
        parts = self.size(), self.size(), *output.unflatten(0, (self.size(), -1)).shape[1:]
        return self._collective(
            given, output, lambda all_: all_.view(parts)[:, self.rank()].reshape(output.shape)
        )

    def broadcast(self, tensors: list[Tensor], options: Any) -> StreamWork:
        return self._collective(tensors[0], tensors[0], lambda all_: all_[options.rootRank])

    def _collective(self, given: Tensor, output: Tensor, result: Callable[[Tensor], Tensor]) -> StreamWork:
        """Writes a result of what all processes give, by process."""
        assert given.is_contiguous()
        assert output.is_contiguous()
        host = torch.empty_like(given, device="cpu", pin_memory=True)
        found = torch.empty_like(output, device="cpu", pin_memory=True)
        work = self._copy(host, given)
        number = next(self._numbers)
        stream = self._stream_after_current(given.device)
        held = _hold(stream) if _DEFERS else None

        def exchange() -> None:
            try:
                if _DEFERS:
                    work.synchronize()
                self._store.set(f"collective {number} of {self.rank()}", "")
                for rank in range(self.size()):
                    self._wait_for(f"collective {number} of {rank}")
                all_ = [torch.empty_like(host, pin_memory=False) for _ in range(self.size())]
                self._gloo.allgather([all_], [host]).wait()
                found.copy_(result(torch.stack(all_)))
            finally:
                if _DEFERS:
                    _release(held)

        self._run(exchange)
        return self._copy(output, found)

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


def _reduced(all_: Tensor, reduce: Any) -> Tensor:
    """Returns the sum or another reduction over processes, in their order."""
    if reduce == dist.ReduceOp.MAX:
        return all_.amax(0)
    assert reduce == dist.ReduceOp.SUM or reduce == dist.ReduceOp.AVG
    total = functools.reduce(torch.add, all_)
    return total / len(all_) if reduce == dist.ReduceOp.AVG else total


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
