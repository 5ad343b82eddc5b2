"""The processes that torchrun has started: which there are, and how fast messages travel between them.

Each process calls `examine`. They meet in a store of torch.distributed, and then measure one edge after the
other, where an edge is two ranks whose stages exchange tensors::

    rank 0 ──── rank 1 ──── rank 2
       └─────────────────────┘        if ranks have several stages

The keys of the store::

    rank/r      what rank r is
    ready/e/r   set by rank r when it begins edge e
    edge/e      what the first rank of edge e has measured, or the error of the first that fails
    end         whether all is well, set by rank 0 when it has reported
    left        the number of ranks that know the end
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor

from gpipe_fast.distributed.ranks import gloo_group, nccl_group
from gpipe_fast.distributed.timed_store import TimedStore

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_POLL_SECONDS = 0.01
# How many timeouts two ranks take at most: two to meet; for each backend one to connect, and one to measure.
_PATIENCE = 8
_NUM_TRIPS, _NUM_LARGE, _LARGE_BYTES = 200, 5, 2**23


@dataclass(frozen=True)
class RankInfo:
    """A process: its host, its device and the versions that must be those of the others."""

    rank: int
    host: str
    device: str
    torch: str
    gpipe_fast: str


@dataclass(frozen=True)
class Edge:
    """One direction between two ranks.

    Attributes:
        sender: the rank that sends.
        receiver: the rank that receives.
        backend: gloo or nccl.
        latency: half the median round trip of 8 bytes, in seconds.
        bandwidth: the median bytes per second of messages of 8 MiB.
        error: why it could not be measured; else empty.
    """

    sender: int
    receiver: int
    backend: str
    latency: float = 0.0
    bandwidth: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Network:
    """What `examine` has found. `tables` shows it."""

    ranks: list[RankInfo]
    edges: list[Edge]

    def problems(self) -> list[str]:
        """Returns what differs between ranks, and the edges that failed."""
        found = []
        for name in ("torch", "gpipe_fast"):
            versions = {rank.rank: getattr(rank, name) for rank in self.ranks}
            if len({*versions.values()}) > 1:
                each = ", ".join(f"{version} on rank {rank}" for rank, version in versions.items())
                found.append(f"the versions of {name} differ: {each}; install the same on all hosts")
        found += [
            f"{e.backend} from rank {e.sender} to {e.receiver}: {e.error}" for e in self.edges if e.error
        ]
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as numbers, strings, lists and dicts, for JSON."""
        found: dict[str, Any] = asdict(self)
        return found | {"problems": self.problems()}

    def sections(self) -> list[tuple[str, list[str]]]:
        """Returns the titles and lines of the report."""
        ranks = [list(asdict(rank).values()) for rank in self.ranks]
        edges = [
            [f"{e.sender} to {e.receiver}", e.backend]
            + (["failed", ""] if e.error else [f"{e.latency * 1e6:.1f}", f"{e.bandwidth / 1e6:.1f}"])
            for e in self.edges
        ]
        return [
            ("ranks", _table(["rank", "host", "device", "torch", "gpipe_fast"], ranks)),
            ("edges", _table(["ranks", "backend", "latency µs", "MB/s"], edges) if edges else []),
            ("problems", self.problems()),
        ]


def _table(headers: list[str], rows: list[list[Any]]) -> list[str]:
    return str(tabulate(rows, headers, tablefmt="plain", disable_numparse=True)).splitlines()


def is_launched() -> bool:
    """Returns whether this process is one of those that torchrun has started, and can connect to others."""
    can_connect = dist.is_available() and dist.is_gloo_available()
    return can_connect and all(name in os.environ for name in _VARIABLES)


def examine(timeout: float, report: Callable[[Network], None]) -> bool:
    """Examines the network between the processes of torchrun, all of which call this.

    Args:
        timeout: the maximum time, in seconds, to wait for another rank or for a message.
        report: called on rank 0 with what was found.

    Returns:
        Whether there was no problem, on all ranks.

    Raises:
        RuntimeError: a rank has not come, or has ended.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return _Examination(rank, size, TimedStore(_store(rank, timeout), timeout), timeout).run(report)


def _store(rank: int, timeout: float) -> Any:
    """Returns the store of torchrun, or else one in the process of rank 0."""
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = rank == 0 and not has_agent
    limit = timedelta(seconds=timeout)
    try:
        make: Any = dist.TCPStore  # type: ignore[attr-defined]
        store = make(host, int(port), is_master=is_master, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank} has not found rank 0 at MASTER_ADDR={host}, MASTER_PORT={port} within {timeout} s; "
            f"start all ranks with the address of rank 0, which must be reachable: {error}"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"gpipe_fast/doctor/{attempt}", store)  # type: ignore[attr-defined]


class _Examination:
    """What one rank does."""

    def __init__(self, rank: int, size: int, store: TimedStore, timeout: float) -> None:
        self._rank, self._size, self._store, self._timeout = rank, size, store, timeout
        self._device = _own_device()

    def run(self, report: Callable[[Network], None]) -> bool:
        own = RankInfo(
            self._rank,
            socket.gethostname(),
            _title(self._device),
            torch.__version__,
            sys.modules["gpipe_fast"].__version__,
        )
        self._store.set(f"rank/{self._rank}", json.dumps(asdict(own)))
        keys = [f"rank/{rank}" for rank in range(self._size)]
        missing = [rank for rank, key in enumerate(keys) if not self._comes(key, self._timeout)]
        if missing:
            raise RuntimeError(
                f"rank {self._rank} has waited for {self._timeout} s for ranks {missing} of {self._size}, "
                "which have not come; start them with the same MASTER_ADDR and WORLD_SIZE, or pass a larger "
                "--timeout"
            )
        ranks = [RankInfo(**json.loads(self._store.get(key))) for key in keys]
        edges = [edge for number, pair in enumerate(self._pairs()) for edge in self._edges(number, pair)]
        if self._rank == 0:
            found = Network(ranks, edges)
            report(found)
            return self._end(found)
        if not self._comes("end", _PATIENCE * self._timeout):
            raise RuntimeError(
                f"rank {self._rank} has waited for {_PATIENCE * self._timeout} s for the report of rank 0, "
                "which has ended or hangs; start all ranks again"
            )
        is_good = bool(self._store.get("end") == b"good")
        self._store.add("left", 1)
        return is_good

    def _end(self, found: Network) -> bool:
        """Tells the others that they may end, and waits for them: they need this process and its store."""
        is_good = not found.problems()
        self._store.set("end", "good" if is_good else "bad")
        end = time.monotonic() + self._timeout
        while self._store.add("left", 0) < self._size - 1 and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        return is_good

    def _pairs(self) -> list[tuple[int, int]]:
        """Returns the ranks whose stages are neighbours."""
        pairs = [(rank, rank + 1) for rank in range(self._size - 1)]
        return [*pairs, *([(0, self._size - 1)] if self._size > 2 else [])]

    def _edges(self, number: int, ranks: tuple[int, int]) -> list[Edge]:
        """Returns what is measured between two ranks; the others wait."""
        key = f"edge/{number}"
        if self._rank in ranks:
            found = [asdict(edge) for edge in self._measured(number, ranks)]
            # If the first has ended, the second says so.
            if self._rank == ranks[0] or any(edge["error"] for edge in found):
                self._store.compare_set(key, "", json.dumps(found))
        if not self._comes(key, _PATIENCE * self._timeout):
            return _failed("gloo", ranks, f"neither rank has answered for {_PATIENCE * self._timeout} s")
        return [Edge(**each) for each in json.loads(self._store.get(key))]

    def _measured(self, number: int, ranks: tuple[int, int]) -> list[Edge]:
        end = ranks.index(self._rank)
        found: list[Edge] = []
        backend = "gloo"
        try:
            for backend, make, device in self._backends(number, ranks[1 - end]):
                store = dist.PrefixStore(f"{backend}/{number}", self._store.store)  # type: ignore[attr-defined]
                group = self._store.call(make, store, end, 2, self._timeout)
                both = _Meter(group, end, device, self._timeout).both()
                found += [
                    Edge(*ends, backend, *own) for ends, own in zip((ranks, ranks[::-1]), both, strict=True)
                ]
        except RuntimeError as error:
            found += _failed(backend, ranks, str(error))
        return found

    def _backends(self, number: int, other: int) -> Iterator[tuple[str, Any, torch.device]]:
        """Yields by which backends this rank and another one can exchange tensors."""
        own = _place(self._device)
        self._store.set(f"ready/{number}/{self._rank}", own)
        # The other rank may still wait for a third one, to which it cannot connect.
        if not self._comes(f"ready/{number}/{other}", 2 * self._timeout):
            raise RuntimeError(
                f"rank {self._rank} has waited for {2 * self._timeout} s for rank {other}, which has ended "
                "or hangs; start all ranks again"
            )
        theirs = self._store.get(f"ready/{number}/{other}").decode()
        yield "gloo", gloo_group, torch.device("cpu")
        if own and theirs and own != theirs:  # NCCL needs a GPU for each
            yield "nccl", nccl_group, self._device

    def _comes(self, key: str, seconds: float) -> bool:
        """Waits until a key is set; returns whether it is."""
        end = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_SECONDS)
        return True


def _failed(backend: str, ranks: tuple[int, int], error: str) -> list[Edge]:
    return [Edge(*ends, backend, error=error) for ends in (ranks, ranks[::-1])]


class _Meter:
    """Measures between the two ends of a group, on each of which the same calls are made."""

    def __init__(self, group: Any, end: int, device: torch.device, timeout: float) -> None:
        self._group, self._end, self._timeout = group, end, timeout
        self._small = torch.zeros(1, dtype=torch.float64, device=device)
        self._large = torch.zeros(_LARGE_BYTES, dtype=torch.uint8, device=device)

    def both(self) -> list[tuple[float, float]]:
        """Returns the latency and the bandwidth from end 0 to end 1, and back."""
        latency = self._median(0, self._small, _NUM_TRIPS) / 2
        found = []
        for sender in (0, 1):
            seconds = self._median(sender, self._large, _NUM_LARGE) - latency
            found.append((latency, _LARGE_BYTES / max(seconds, 1e-9)))
        return found

    def _median(self, sender: int, tensor: Tensor, count: int) -> float:
        """Returns, on both ends, the median seconds from the sending of a tensor to its short answer.

        The first is not counted. After a third of the timeout there are no more.
        """
        times: list[float] = []
        end = time.monotonic() + self._timeout / 3
        while self._agreed(sender, len(times) <= count and (not times or time.monotonic() < end)):
            begin = time.monotonic()
            self._pass(sender, tensor)
            self._pass(1 - sender, self._small)
            times.append(time.monotonic() - begin)
        self._small.fill_(statistics.median(times[1:] or times))
        self._pass(sender, self._small)
        return float(self._small)

    def _agreed(self, sender: int, value: bool) -> bool:
        """Returns the value on the sending end."""
        self._small.fill_(value)
        self._pass(sender, self._small)
        return bool(self._small)

    def _pass(self, sender: int, tensor: Tensor) -> None:
        is_sender = sender == self._end
        work = (self._group.send if is_sender else self._group.recv)([tensor], 1 - self._end, 0)
        work.wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)


def _own_device() -> torch.device:
    """Returns the GPU of this process, or the CPU."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _title(device: torch.device) -> str:
    return str(device) if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"


def _place(device: torch.device) -> str:
    """Returns what tells the GPUs of all hosts apart; nothing for a CPU."""
    if device.type == "cpu":
        return ""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
