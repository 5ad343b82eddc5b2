"""Reports of steps with one planted problem each: whether cause and advice are right, on this machine now.

Each problem is planted {RUNS} times in a model of {LAYERS} x (Linear({WIDTH}, {WIDTH}), GELU), batch {BATCH},
in two stages of one thread, which are in two processes if the problem is what crosses between them. *cause*
has the largest share of idle time, apart from the host's. If the report predicts a gain, steps with and
without the change run in turn, and those that one of five steps does not exceed are compared: the time that
remains is right within {TOLERANCE:.0%}. If it predicts none, it says why, and names the setting. The load was
{load}.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench import process
from bench.measure import report
from bench.peers import free_port, join
from gpipe_fast import GPipe
from gpipe_fast.reports.report import Report

RUNS, LAYERS, WIDTH, BATCH, ROUNDS = 3, 8, 256, 1024, 30
TOLERANCE = 0.15
HEADERS = ["problem", "cause", "advice", "gain predicted", "gain measured", "right"]


class Additions(nn.Module):
    """Many small operators; and a branch, if it is to run in Python."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, :8]
        for _ in range(400):
            y = y + 1e-3
        if self.branches and y.sum() > 1e9:
            y = y + 1
        return torch.cat([y, x[:, 8:]], 1)


class Wide(nn.Module):
    """Returns much more than it is given; or takes a part of that."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.times, 1) if self.times else x[:, :WIDTH] * 2


def block(times: int = 1) -> nn.Sequential:
    """Returns a layer that takes so many times as long as others."""
    return nn.Sequential(*(m for _ in range(times) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def blocks(number: int = LAYERS) -> list[nn.Module]:
    return [block() for _ in range(number)]


@dataclass(frozen=True)
class Problem:
    """A planted problem.

    Attributes:
        layers: makes the layers; of the mended model if the argument is true.
        settings: the settings of the model.
        cause: the cause of most idle time; empty if any may be.
        advice: what advice, or what is withheld, changes: a setting or a word; empty if nothing.
        ranks: whether each stage is in a process.
    """

    layers: Callable[[bool], list[nn.Module]] = lambda _: blocks()
    settings: dict[str, Any] = field(default_factory=dict)
    cause: str = ""
    advice: str = ""
    ranks: bool = False

    def model(self, mended: bool = False, **changes: Any) -> GPipe:
        torch.manual_seed(0)
        settings: dict[str, Any] = {
            "balance": [4, 4],
            "chunks": 8,
            "checkpoint": "never",
            "schedule": "zb-h1",
        }
        settings |= {"threads_per_stage": 1} | self.settings | changes
        threads = settings.pop("threads_per_stage")
        place: Any = {"mesh": dist.group.WORLD} if self.ranks else {"devices": ["cpu", "cpu"]}
        model = GPipe(nn.Sequential(*self.layers(mended)), **settings, **place)
        model.threads_per_stage = threads
        return model


PROBLEMS = {
    "slow stage": Problem(lambda _: [*blocks(7), block(5)], cause="imbalance", advice="balance"),
    "unbalanced": Problem(settings={"balance": [2, 6]}, cause="imbalance", advice="balance"),
    "few chunks": Problem(settings={"chunks": 1}, cause="fill and drain", advice="chunks"),
    "needless recompute": Problem(settings={"checkpoint": "always"}, advice="checkpoint"),
    "layer in Python": Problem(
        lambda mended: [block(), Additions(not mended), *blocks(6)], cause="Python", advice="Python"
    ),
    "too many threads": Problem(settings={"threads_per_stage": 8}, advice="threads_per_stage"),
    "fat boundary tensor": Problem(
        lambda _: [*blocks(3), Wide(16), Wide(0), *blocks(3)], cause="transfer", advice="balance", ranks=True
    ),
    "none": Problem(),
}


def step(model: GPipe, x: Tensor, y: Tensor) -> float:
    """Returns the seconds of a step."""
    begun = perf_counter()
    for parameter in model.parameters():
        parameter.grad = None
    model.step(x, target=y, loss_fn=F.mse_loss)
    return perf_counter() - begun


def measured_gain(before: GPipe, after: GPipe, x: Tensor, y: Tensor) -> float:
    """Returns the share of a step that a change saves; steps of both run in turn."""
    times: tuple[list[float], list[float]] = [], []
    for number in range(ROUNDS + 3):
        for model, own in zip((before, after), times, strict=True):
            seconds = step(model, x, y)
            own += [seconds] if number >= 3 else []
    first, second = (sorted(own)[len(own) // 5] for own in times)
    return 1 - second / first


def diagnose(name: str) -> list[str]:
    """Returns the row of a report on a planted problem; of two ranks, each calls this."""
    problem = PROBLEMS[name]
    torch.manual_seed(1)
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    model = problem.model()
    for _ in range(3):
        step(model, x, y)
    found: Report = model.report(x, target=y, loss_fn=F.mse_loss)
    causes = {cause: share for cause, share in found.blame.items() if cause != "host"}
    cause = max(causes, key=causes.__getitem__)
    is_right = problem.cause in (cause, "")
    if not found.advice:
        is_right &= not problem.advice or any(problem.advice in each for each in found.withheld)
        return [name, cause, f"none claimed: {'; '.join(found.withheld)}", "", "", _word(is_right)]
    first = found.advice[0]
    named = [*found.withheld, *(word for each in found.advice for word in (*each.settings, each.what))]
    is_right &= problem.advice != "" and any(problem.advice in each for each in named)
    other = problem.model(**first.settings) if first.settings else problem.model(mended=True)
    predicted, gain = 1 - first.predicted / found.step, measured_gain(model, other, x, y)
    error, least = predicted - gain, "" if first.settings else "at least "
    is_right &= (error if least else abs(error)) <= TOLERANCE * (1 - gain)
    found_gain = f"{least}{predicted:.0%}"
    return [name, cause, first.code or first.what, found_gain, f"{gain:.0%}", _word(is_right)]


def _word(is_right: bool) -> str:
    return "yes" if is_right else "NO"


def _of_rank(rank: int, port: int, name: str, found: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    join(port, rank, 2)
    row = diagnose(name)
    if rank == 0:
        found.put(row)
    dist.destroy_process_group()


def in_ranks(name: str) -> list[str]:
    """Returns the row of a problem of two ranks."""
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    port = free_port()
    ranks = [context.Process(target=_of_rank, args=(rank, port, name, found)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    row: list[str] = found.get()
    return row


def write(names: Sequence[str] = tuple(PROBLEMS), runs: int = RUNS) -> None:
    """Measures in this process, whose threads must have one OpenMP thread each."""
    warnings.simplefilter("ignore")
    rows: list[list[str]] = []
    for _ in range(runs):
        for name in names:
            rows.append(in_ranks(name) if PROBLEMS[name].ranks else diagnose(name))
            print("  ".join(rows[-1]), flush=True)
    if runs == RUNS and len(names) == len(PROBLEMS):
        right = sum(row[-1] == "yes" for row in rows)
        load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} processors; {right} of {len(rows)} are right"
        report(globals(), HEADERS, sorted(rows), load=load)


def main() -> None:
    process.call("bench.micro.planted:write")
