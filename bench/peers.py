"""What our steps are compared with, all alike from outside: in this process, or in processes of their own."""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Forward = Callable[[Tensor], Tensor]

# What is not ours adds up in another order, in float32: its gradients may be off by this share of the largest
# element of their tensor.
TOLERANCE = 1e-5


class Candidate(Protocol):
    """What is timed."""

    def __call__(self) -> None:
        """Makes one step, from no gradients to all of them."""

    def gradients(self) -> list[Tensor]:
        """The latest step's, in the order of the model's parameters."""


class Step:
    """Forward and backward of one mini-batch, given the gradient of its output."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], forward: Forward, input: Tensor, gradient: Tensor
    ) -> None:
        self.parameters = list(parameters)
        self.forward, self.input, self.gradient = forward, input, gradient

    def __call__(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.forward(self.input).backward(self.gradient)

    def gradients(self) -> list[Tensor]:
        return _gradients(self.parameters)


def looped(model: Forward, chunks: int) -> Forward:
    """The plain loop over micro-batches."""
    return lambda input: torch.cat([model(chunk) for chunk in input.chunk(chunks)])


def checkpointed(stages: Sequence[nn.Module]) -> Forward:
    """The stages one after the other; the backward recomputes each as a whole, as GPipe does."""

    def forward(input: Tensor) -> Tensor:
        for stage in stages:
            input = checkpoint(stage, input, use_reentrant=False)
        return input

    return forward


class Checkpointed(nn.Module):
    """The same of one stage, as a module."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.stage, input, use_reentrant=False)
        return result


class Pipelining:
    """One stage's part in the steps of torch.distributed.pipelining's GPipe, in a process of its own.

    It takes a loss, not a gradient: here the one that has this gradient.
    """

    def __init__(
        self,
        rank: int,
        stages: Sequence[nn.Module],
        recompute: bool,
        chunks: int,
        input: Tensor,
        gradient: Tensor,
    ) -> None:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        module = Checkpointed(stages[rank]) if recompute else stages[rank]
        stage = PipelineStage(module, rank, len(stages), torch.device("cpu"))
        self.schedule = ScheduleGPipe(
            stage, chunks, loss_fn=lambda output, wanted: (output * wanted).sum(), scale_grads=False
        )
        self.parameters = list(module.parameters())
        self.arguments = (input,) if rank == 0 else ()
        self.target = gradient if rank == len(stages) - 1 else None

    def __call__(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.schedule.step(*self.arguments, target=self.target)

    def gradients(self) -> list[Tensor]:
        return _gradients(self.parameters)


def join(rendezvous: str, rank: int, size: int) -> None:
    """Makes this process the member ``rank`` of a gloo group that meets at a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)


def has_torchgpipe() -> bool:
    """Whether it is installed; a GPU machine that installs nothing may lack it."""
    return importlib.util.find_spec("torchgpipe") is not None


class Elsewhere:
    """A candidate in processes of its own, which sleep but while it makes a step.

    Args:
        make: called in each process, with its number and ``arguments``.
        arguments: for ``make``; both must pickle.
        threads: intra-op threads of each process.
        processes: how many.
    """

    def __init__(
        self, make: Callable[..., Candidate], arguments: Sequence[object], threads: int, processes: int = 1
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = str(threads)  # for every thread that they start
        try:
            for number in range(processes):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, make, number, *arguments), daemon=True)
                process.start()
                theirs.close()
                self._connections.append(ours)
                self._processes.append(process)
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before

    def __call__(self) -> None:
        self._all("step")

    def gradients(self) -> list[Tensor]:
        return [torch.from_numpy(gradient) for part in self._all("gradients") for gradient in part]

    def peak_bytes(self) -> int | None:
        """Makes a step; the memory it needs beyond that before the first, or None where nobody tells."""
        peaks = self._all("peak_bytes")
        return None if None in peaks else sum(peaks)

    def idle_seconds(self) -> float:
        """Processor time spent so far between steps."""
        return float(sum(self._all("idle_seconds")))

    def close(self) -> None:
        for connection in self._connections:
            connection.send("close")
        for process in self._processes:
            process.join()

    def _all(self, command: str) -> list[Any]:
        for connection in self._connections:
            connection.send(command)
        return [connection.recv() for connection in self._connections]


class _Server:
    """One process of a candidate, at its own end."""

    def __init__(self, step: Candidate) -> None:
        self.step = step
        self._resident = _status("VmRSS")
        self._idle, self._since = 0.0, time.process_time()

    def serve(self, connection: Connection) -> None:
        while (command := connection.recv()) != "close":
            self._idle += time.process_time() - self._since
            connection.send(getattr(self, command)())
            self._since = time.process_time()

    def gradients(self) -> list[Any]:
        return [gradient.numpy() for gradient in self.step.gradients()]

    def peak_bytes(self) -> int | None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        except OSError:
            return None
        self.step()
        peak = _status("VmHWM")
        return None if peak is None or self._resident is None else peak - self._resident

    def idle_seconds(self) -> float:
        return self._idle


def _serve(connection: Connection, make: Callable[..., Candidate], number: int, *arguments: object) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    _Server(make(number, *arguments)).serve(connection)
    if dist.is_initialized():
        dist.destroy_process_group()


def _status(field: str) -> int | None:
    """Bytes, of this process."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), None)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    gradients = [parameter.grad for parameter in parameters]
    assert all(gradient is not None for gradient in gradients)
    return [gradient for gradient in gradients if gradient is not None]


def off_by(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference, as a share of the largest element of its tensor; 0 if all bits are equal."""
    if all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True)):
        return 0.0
    shares = [((f - w).abs().max() / w.abs().max()).item() for f, w in zip(found, wanted, strict=True)]
    return max(shares) if all(map(math.isfinite, shares)) else math.inf


def agrees(name: str, off: float) -> bool:
    """Whether a candidate's gradients are right; ours must have the reference's bits."""
    return off == 0 if name.startswith("gpipe_fast") else off <= TOLERANCE


def verdict(name: str, off: float) -> str:
    """The same in words."""
    if off == 0:
        return "equal"
    return f"{'within' if agrees(name, off) else 'WRONG, off by'} {off:.0e}"
