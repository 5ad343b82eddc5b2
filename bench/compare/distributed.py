"""Steps of two processes, compared with torch.distributed.pipelining under the same schedules.

{case.count} GPT blocks of width {case.width}, 8 heads, {case.batch} x {case.length} tokens per micro-batch, M
= {case.chunks}; a step without an update. Each candidate has {STAGES} processes with one intra-op thread.
Tensors travel by gloo, through the loopback device or between network namespaces, where a relay adds the
delay in each direction and `tc tbf` limits the rate. The other candidate recomputes by non-reentrant
torch.utils.checkpoint. Candidates alternate; medians of {ROUNDS} steps. Gradients are compared with those of
the plain loop with one thread, which adds them up in the order of the schedule: ours must be equal, others
may differ by {TOLERANCE:.0e} of the largest element of their tensor. The load average was {before} before and
{after} after; this benchmark alone makes it about 2.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from bench.compare.network import Host, NoNetworkError, network
from bench.compare.step import OURS, PAUSE, PIPELINING, STAGES, Case
from bench.comparison import Outcome, compare, gradients, one_thread
from bench.measure import Ratio, Table, report
from bench.peers import Candidate, ProcessCandidate, TorchPipelining, weighted_sum

ROUNDS = 25
SCHEDULES = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Link:
    """The connection between the processes.

    Attributes:
        name: its name in the table.
        delay: seconds that are added to each packet; None for the loopback device of this machine.
        megabits: the rate at which each process sends, in Mbit/s; None for no limit.
    """

    name: str
    delay: float | None = None
    megabits: float | None = None

    @contextlib.contextmanager
    def hosts(self) -> Iterator[list[Host]]:
        """Makes the hosts of the processes; none for the loopback device.

        Raises:
            NoNetworkError: this machine cannot make them.
        """
        if self.delay is None:
            yield []
            return
        with network(STAGES, self.delay, self.megabits) as hosts:
            yield hosts


LINKS = [Link("loopback"), Link("2 ms", 0.002), Link("2 ms, 1 Gbit/s", 0.002, 1000)]
# By name: full recomputation, M = 8.
CASES = {
    "large": Case(recompute=True, chunks=8),
    "small": Case(recompute=True, chunks=8, batch=1, length=32, width=64),
}


class Ours:
    """One rank's part of a step of a GPipe with a mesh, in its own process."""

    def __init__(self, case: Case, schedule: str, mesh: Any = None, divisor: int = 1) -> None:
        from gpipe_fast import GPipe

        stages = case.stages()
        self.model = GPipe(
            nn.Sequential(*itertools.chain(*stages)),
            [len(stage) for stage in stages],
            chunks=case.chunks,
            checkpoint="always" if case.recompute else "never",
            schedule=schedule,
            mesh=dist.group.WORLD if mesh is None else mesh,
        )
        self.parameters = [p for p in self.model.parameters() if not p.is_meta]
        self.input, self.weights = case.data()
        self.divisor = divisor

    def __call__(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.model.step(self.input, target=self.weights, loss_fn=weighted_sum, normalizer=self.divisor)

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]


def make(number: int, name: str, case: Case, schedule: str, hosts: Sequence[Host], port: int) -> Candidate:
    """Builds the part of a candidate that belongs to process ``number``, on its host, if there are any."""
    if hosts:
        hosts[number].enter()
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    address = hosts[0].address if hosts else "127.0.0.1"
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=number, world_size=STAGES)
    if name == OURS:
        return Ours(case, schedule)
    return TorchPipelining(number, case.stages(), case.recompute, case.chunks, *case.data(), schedule)


def wanted_gradients(case: Case, schedule: str) -> list[Tensor]:
    """Returns the gradients of the plain loop with one thread, added up in the order of the schedule."""
    if schedule == "gpipe":
        return case.reference_gradients()
    model = nn.Sequential(*itertools.chain(*case.stages()))
    with one_thread():
        for input, gradient in zip(*(x.chunk(case.chunks) for x in case.data()), strict=True):
            model(input).backward(gradient)
    return [p.grad for p in model.parameters() if p.grad is not None]


def free_port() -> int:
    """Returns a port of the loopback device that nothing listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def measure(case: Case, schedule: str, link: Link, rounds: int) -> dict[str, Outcome]:
    """Compares the gradients of two steps, then times the candidates whose gradients are right.

    Raises:
        NoNetworkError: this machine cannot make the hosts of the link.
    """
    with ExitStack() as stack:
        hosts = stack.enter_context(link.hosts())
        candidates = {}
        for name in (OURS, PIPELINING):
            arguments = name, case, schedule, hosts, free_port()
            candidates[name] = ProcessCandidate(make, arguments, threads=1, processes=STAGES)
            stack.callback(candidates[name].close)
        return compare(candidates, wanted_gradients(case, schedule), rounds, pause=PAUSE)


HEADERS = [
    "link",
    "schedule",
    "gpipe_fast, ms: median [p20, p80]",
    "torch.distributed.pipelining, ms",
    "time / ours: median of pairs [95% interval]",
    "gradients of ours",
    "of the other",
]


def row(link: Link, schedule: str, results: dict[str, Outcome]) -> list[object]:
    """Returns a row of the table; a candidate whose gradients are wrong gets no time."""
    ours, theirs = results[OURS], results[PIPELINING]
    ratio = str(Ratio.of(theirs.times, ours.times)) if ours.times and theirs.times else "-"
    offs = [gradients(name, each) for name, each in results.items()]
    return [link.name, schedule, ours.ms(), theirs.ms(), ratio, *offs]


def rows(case: Case, links: Sequence[Link], rounds: int) -> list[list[object]]:
    """Returns a row for each link and schedule; one row with the reason for a link that cannot be made."""
    found = []
    for link, schedule in itertools.product(links, SCHEDULES):
        try:
            found.append(row(link, schedule, measure(case, schedule, link, rounds)))
        except NoNetworkError as error:
            found.append([link.name, schedule, f"SKIPPED: {error}"])
    return found


def load() -> str:
    """Returns the load average over the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def main() -> None:
    before = load()
    large, small = (rows(case, LINKS, ROUNDS) for case in CASES.values())
    case, tiny = CASES.values()
    report(
        globals(),
        HEADERS,
        large,
        [
            Table(
                "Little work: messages and waits take most of the time",
                HEADERS,
                small,
                f"The same with blocks of width {tiny.width} and {tiny.batch} x {tiny.length} tokens.\n",
            )
        ],
        case=case,
        before=before,
        after=load(),
    )
