"""Candidates with which our steps are compared; all have one interface. Some run in child processes."""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench import resident

Forward = Callable[[Tensor], Tensor]

# Other candidates may sum float32 in another order: their gradients may differ by this fraction of the
# largest element of their tensor.
TOLERANCE = 1e-5


class Candidate(Protocol):
    """A training step that can be timed."""

    def __call__(self) -> None:
        """Runs one step, from no gradients to all gradients."""

    def gradients(self) -> list[Tensor]:
        """Returns the gradients of the latest step, in the order of the model's parameters."""


class Step:
    """Forward and backward of one mini-batch from a given gradient of its output."""

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
    """Returns the plain loop over micro-batches."""
    return lambda input: torch.cat([model(chunk) for chunk in input.chunk(chunks)])


def checkpointed(stages: Sequence[nn.Module]) -> Forward:
    """Returns the sequence of stages, each recomputed as a whole in the backward, as GPipe does."""

    def forward(input: Tensor) -> Tensor:
        for stage in stages:
            input = checkpoint(stage, input, use_reentrant=False)
        return input

    return forward


class Checkpointed(nn.Module):
    """A module that recomputes one stage as a whole in the backward."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.stage, input, use_reentrant=False)
        return result


def weighted_sum(output: Tensor, weights: Tensor) -> Tensor:
    """Returns a loss whose gradient is ``weights``."""
    return (output * weights).sum()


class TorchPipelining:
    """One rank's part of a step of torch.distributed.pipelining, in its own process.

    Its schedules take a loss instead of an output gradient; this loss has the given output gradient.
    """

    def __init__(
        self,
        rank: int,
        stages: Sequence[nn.Module],
        recompute: bool,
        chunks: int,
        input: Tensor,
        gradient: Tensor,
        schedule: str = "gpipe",
        group: Any = None,
    ) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        module = Checkpointed(stages[rank]) if recompute else stages[rank]
        stage = PipelineStage(module, rank, len(stages), torch.device("cpu"), group=group)
        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
        self.schedule = kind(stage, chunks, loss_fn=weighted_sum, scale_grads=False)
        self.parameters = list(module.parameters())
        self.arguments = (input,) if rank == 0 else ()
        self.target = gradient if rank == len(stages) - 1 else None

    def __call__(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.schedule.step(*self.arguments, target=self.target)

    def gradients(self) -> list[Tensor]:
        return _gradients(self.parameters)


def free_port() -> int:
    """Returns a port of the loopback device that nothing listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def join(port: int, rank: int, size: int, address: str = "127.0.0.1") -> None:
    """Joins this process to a gloo group as `rank`; the processes meet at a port of the first one's host."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=size)


def has_torchgpipe() -> bool:
    """Returns whether torchgpipe is installed; GPU machines without network may lack it."""
    return importlib.util.find_spec("torchgpipe") is not None


class ProcessCandidate:
    """A candidate in its own processes, which sleep except while they run a step.

    Args:
        make: builds the candidate; called in each process with its number and `arguments`.
        arguments: arguments of `make`; both must be picklable.
        threads: number of intra-op threads of each process.
        processes: number of processes.
    """

    def __init__(
        self, make: Callable[..., Candidate], arguments: Sequence[object], threads: int, processes: int = 1
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        # The processes inherit the environment.
        with mock.patch.dict(os.environ, OMP_NUM_THREADS=str(threads)):
            for number in range(processes):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, make, number, *arguments), daemon=True)
                process.start()
                theirs.close()
                self._connections.append(ours)
                self._processes.append(process)

    def __call__(self) -> None:
        self._request_all("step")

    def gradients(self) -> list[Tensor]:
        return [torch.from_numpy(gradient) for part in self._request_all("gradients") for gradient in part]

    def peak_bytes(self) -> int | None:
        """Runs a step and returns its peak memory beyond the memory before the first step.

        Returns None on systems that do not report it.
        """
        peaks = self._request_all("peak_bytes")
        return None if None in peaks else sum(peaks)

    def parts_of_peak(self) -> tuple[int, int] | None:
        """Returns what the earlier steps have left, beyond the memory before the first, and what the peak of
        one more step adds to it, in bytes; None on systems that do not report them.
        """
        found = self._request_all("parts_of_peak")
        return None if None in found else (sum(left for left, _ in found), sum(added for _, added in found))

    def close(self) -> None:
        for connection in self._connections:
            connection.send("close")
        for process in self._processes:
            process.join()

    def _request_all(self, command: str) -> list[Any]:
        for connection in self._connections:
            connection.send(command)
        return [connection.recv() for connection in self._connections]


class _Server:
    """The child-process end of a candidate."""

    def __init__(self, step: Candidate) -> None:
        self.step = step
        self._resident = resident.present() if resident.reset_peak() else None

    def serve(self, connection: Connection) -> None:
        while (command := connection.recv()) != "close":
            connection.send(getattr(self, command)())

    def gradients(self) -> list[Any]:
        return [gradient.numpy() for gradient in self.step.gradients()]

    def peak_bytes(self) -> int | None:
        if self._resident is None:
            return None
        resident.reset_peak()
        self.step()
        return round((resident.peak() - self._resident) * 2**20)

    def parts_of_peak(self) -> tuple[int, int] | None:
        if self._resident is None:
            return None
        resident.release()
        left = round((resident.present() - self._resident) * 2**20)
        peak = self.peak_bytes()
        return None if peak is None else (left, peak - left)


def in_processes(
    make: Callable[..., Candidate],
    candidates: Mapping[str, tuple[int, int]],
    arguments: Sequence[object],
    stack: ExitStack,
) -> dict[str, ProcessCandidate]:
    """Returns candidates in their own processes, until a stack is closed.

    Args:
        make: as for `ProcessCandidate`; it gets the candidate's name and a free port before other arguments.
        candidates: by name, the number of processes, and of threads of each.
        arguments: further arguments of `make`.
        stack: closes the processes.
    """
    found = {}
    for name, (processes, threads) in candidates.items():
        found[name] = ProcessCandidate(make, (name, free_port(), *arguments), threads, processes)
        stack.callback(found[name].close)
    return found


def _serve(connection: Connection, make: Callable[..., Candidate], number: int, *arguments: object) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    _Server(make(number, *arguments)).serve(connection)
    if dist.is_initialized():
        dist.destroy_process_group()


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    gradients = [parameter.grad for parameter in parameters]
    assert all(gradient is not None for gradient in gradients)
    return [gradient for gradient in gradients if gradient is not None]


def relative_difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Returns the largest difference relative to the largest element of its tensor; 0 if bitwise equal."""
    if all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True)):
        return 0.0
    shares = [((f - w).abs().max() / w.abs().max()).item() for f, w in zip(found, wanted, strict=True)]
    return max(shares) if all(map(math.isfinite, shares)) else math.inf


def gradients_agree(name: str, off: float) -> bool:
    """Returns whether a candidate's gradients are right; ours must be bitwise equal to the reference."""
    return off == 0 if name.startswith("gpipe_fast") else off <= TOLERANCE


def describe_difference(name: str, off: float) -> str:
    """Returns the result of the comparison as text."""
    if off == 0:
        return "equal"
    return f"{'within' if gradients_agree(name, off) else 'WRONG, off by'} {off:.0e}"
