"""Steps of two replicas on two hosts: how much of the sum of their gradients the drain hides.

{CASE.count} GPT blocks of width {CASE.width}, 8 heads, {CASE.batch} x {CASE.length} tokens per micro-batch, M
= {CASE.chunks}, full recomputation; a step without an update. {REPLICAS} replicas, each of {STAGES} processes
with one intra-op thread, all on this machine's cores; each replica is a host, a network namespace whose rate
`tc tbf` limits. Without a sum, the replicas are two pipelines of their own; after the step, each rank sums
all its gradients in one all-reduce of gloo; in the drain, GPipe does, with `dp_replicate` in its mesh. Of the
time that a sum after the step adds, the drain hides the given share. The last stage can hide its sum behind
one backward of the first, whose own sum begins when the step's work is done. Candidates alternate; medians of
{ROUNDS} steps. The load average was {before} before and {after} after; this benchmark alone makes it about 3.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.compare.distributed import SCHEDULES, Ours, free_port, load
from bench.compare.network import Host, NoNetworkError, network
from bench.compare.step import PAUSE, STAGES, Case
from bench.measure import Ratio, report, samples, timing
from bench.peers import ProcessCandidate

ROUNDS, REPLICAS = 25, 2
# Mbit/s at which each host, a replica with all its stages, sends.
RATES = (2000, 500)
CASE = Case(recompute=True, chunks=8)
NONE, AFTER, IN_DRAIN = "no sum", "sum after the step", "sum in the drain"


class Rank(Ours):
    """One rank's part of a step.

    Args:
        case: the model and the data.
        schedule: the schedule.
        how: which candidate it is part of.
    """

    def __init__(self, case: Case, schedule: str, how: str) -> None:
        mesh = init_device_mesh("cpu", (REPLICAS, STAGES), mesh_dim_names=("dp_replicate", "pp"))
        # GPipe sums the divisors of the replicas, too.
        super().__init__(case, schedule, *((mesh, 1) if how == IN_DRAIN else (mesh["pp"], REPLICAS)))
        self.replicas = mesh.get_group("dp_replicate") if how == AFTER else None

    def __call__(self) -> None:
        super().__call__()
        if self.replicas is None:
            return
        bucket = torch.cat([gradient.flatten() for gradient in self.gradients()])
        dist.all_reduce(bucket, group=self.replicas)
        parts = bucket.split([p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)


def make(number: int, how: str, case: Case, schedule: str, hosts: Sequence[Host], port: int) -> Rank:
    """Builds the part of a candidate that belongs to process ``number``; a replica is on one host."""
    hosts[number // STAGES].enter()
    address = f"tcp://{hosts[0].address}:{port}"
    dist.init_process_group("gloo", init_method=address, rank=number, world_size=REPLICAS * STAGES)
    return Rank(case, schedule, how)


def row(case: Case, schedule: str, megabits: float, rounds: int) -> list[object]:
    """Returns a row of the table.

    Raises:
        NoNetworkError: this machine cannot make the hosts.
    """
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(network(REPLICAS, 0.0, megabits))
        candidates = {}
        for how in (NONE, AFTER, IN_DRAIN):
            arguments = how, case, schedule, hosts, free_port()
            candidates[how] = ProcessCandidate(make, arguments, threads=1, processes=REPLICAS * STAGES)
            stack.callback(candidates[how].close)
        for candidate in candidates.values():
            candidate()
        equal = all(map(torch.equal, *(candidates[how].gradients() for how in (AFTER, IN_DRAIN))))
        times = samples(candidates, rounds, pause=PAUSE)
    shown = (f"{sum_ms:.1f}" for sum_ms in (_added(times, AFTER), _added(times, IN_DRAIN)))
    hidden = 1 - _added(times, IN_DRAIN) / _added(times, AFTER)
    return [
        f"{megabits:g} Mbit/s",
        schedule,
        *(timing(times[how]).ms() for how in (NONE, AFTER, IN_DRAIN)),
        *shown,
        f"{hidden:.0%}",
        str(Ratio.of(times[AFTER], times[IN_DRAIN])),
        "equal" if equal else "DIFFERENT",
    ]


def _added(times: dict[str, list[float]], how: str) -> float:
    """Returns by how many milliseconds the sum makes a step longer: the median over the rounds."""
    return median(a - b for a, b in zip(times[how], times[NONE], strict=True)) / 1e3


def main() -> None:
    before = load()
    rows: list[list[object]] = []
    for megabits, schedule in itertools.product(RATES, SCHEDULES):
        try:
            rows.append(row(CASE, schedule, megabits, ROUNDS))
        except NoNetworkError as error:
            rows.append([f"{megabits:g} Mbit/s", schedule, f"SKIPPED: {error}"])
    report(
        globals(),
        [
            "each host sends",
            "schedule",
            *(f"{how}, ms: median [p20, p80]" for how in (NONE, AFTER, IN_DRAIN)),
            "added after, ms",
            "added in the drain, ms",
            "hidden",
            "after / in the drain: median of pairs [95% interval]",
            "gradients",
        ],
        rows,
        before=before,
        after=load(),
    )
