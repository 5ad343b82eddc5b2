"""Blame: why the ranks of a recorded step compute nothing at times.

Between two computations, and before its first and after its last, a rank has a gap. The recorded schedule is
replayed with the recorded durations, and one cause after the other is taken away. What a replay takes from a
gap is due to its cause::

    recorded ─ host ─▶ replayed ─ transfers ─▶ no copies ─ recompute ─▶ no R ─ Python ─▶ operators alone
                                          what is left: fill and drain ◀── equal stages ◀── imbalance ─┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from gpipe_fast.reports.events import Event, PythonTime
from gpipe_fast.schedule import TRANSFERS, Action, Kind, Schedule, Simulation

CAUSES = ("fill and drain", "imbalance", "transfer", "recompute", "Python", "host")
"""What idle time is blamed on.

- fill and drain: stages have no work at the begin and the end of a schedule, and where its directions meet.
- imbalance: stages take different times.
- transfer: stages copy boundary tensors, or wait for them.
- recompute: others wait for recomputes, beyond what these take themselves.
- Python: others wait for layers in Python, beyond what their operators take.
- host: the rest: too few processors, other programs, and the engine itself.
"""


class Phase(NamedTuple):
    """One run of the engine.

    Attributes:
        schedule: the schedule of its actions.
        events: their events.
        waits: the waits before them.
        python: the times of its layers in Python.
        undisturbed: the durations of the actions if nothing else runs on the machine; empty if unknown.
    """

    schedule: Schedule
    events: Mapping[Action, Event]
    waits: Sequence[Event]
    python: Sequence[PythonTime] = ()
    undisturbed: Mapping[Action, float] = MappingProxyType({})

    @property
    def window(self) -> tuple[float, float]:
        """The first begin and the last end."""
        events = self.events.values()
        return min(event.begin for event in events), max(event.end for event in events)

    def seconds(self) -> dict[Action, float]:
        """Returns the duration of each action."""
        return {action: event.end - event.begin for action, event in self.events.items()}

    def interpreted(self, stage: int | None = None) -> dict[Action, float]:
        """Returns the seconds of each action, or of those of a stage, that the interpreter takes."""
        found: defaultdict[Action, float] = defaultdict(float)
        for each in self.python:
            if stage in (None, each.action.stage):
                found[each.action] += max(0.0, each.seconds - each.operators)
        return found

    def transit(self, send: Action) -> float:
        """Returns the seconds from the end of a SEND until the tensor has arrived."""
        return self.events[send].transit

    def replay(self, faster: Mapping[Action, float] = MappingProxyType({})) -> Simulation:
        """Returns the schedule with the recorded durations, where nothing else takes time.

        Args:
            faster: what actions take less.
        """
        seconds = {action: max(0.0, s - faster.get(action, 0.0)) for action, s in self.seconds().items()}
        return Simulation.of(self.schedule, seconds.__getitem__, self.transit)


@dataclass(frozen=True)
class Gap:
    """A time in which a rank computes nothing.

    Attributes:
        rank: the rank.
        begin: seconds, on the clock of the events.
        end: seconds, on the same clock.
        seconds: the part that is due to each cause; the parts add up to the gap.
    """

    rank: int
    begin: float
    end: float
    seconds: Mapping[str, float]


# The causes in the order in which replays take them away.
_ORDER = ("host", "transfer", "recompute", "Python", "imbalance", "fill and drain")


def gaps_of(phase: Phase) -> list[Gap]:
    """Returns the gaps of a run, by rank and time."""
    begin, end = phase.window
    schedule = phase.schedule
    recorded = _gaps(
        schedule,
        {action: event.begin - begin for action, event in phase.events.items()},
        {action: event.end - begin for action, event in phase.events.items()},
        end - begin,
    )
    seconds = phase.undisturbed or phase.seconds()
    replays = [Simulation.of(schedule, seconds.__getitem__, phase.transit)]
    replays += [Simulation.of(schedule, own.__getitem__) for own in _without_causes(phase, seconds)]
    versions = [recorded, *(_gaps(schedule, each.begins, each.ends, each.time) for each in replays)]
    lengths = [[end - begin for _, begin, end in gaps] for gaps in versions]
    parts = _fit(lengths[0], list(zip(*lengths, strict=True)), _totals([sum(own) for own in lengths]))
    return [
        Gap(rank, begin + first, begin + last, dict(zip(_ORDER, own, strict=True)))
        for (rank, first, last), own in zip(recorded, parts, strict=True)
    ]


def blame(gaps: Sequence[Gap]) -> dict[str, float]:
    """Returns the share of each cause in the time of the gaps; the shares add up to 1."""
    total = sum(gap.end - gap.begin for gap in gaps)
    return {cause: sum(gap.seconds[cause] for gap in gaps) / total if total else 0.0 for cause in CAUSES}


def _totals(sums: Sequence[float]) -> list[float]:
    """Returns the seconds that are due to each cause, from the sums of the gaps in each version."""
    lost = [max(0.0, a - b) for a, b in pairwise(sums)]
    if sum(lost) > sums[0] > 0:
        lost = [value * sums[0] / sum(lost) for value in lost]
    return [*lost, max(0.0, sums[0] - sum(lost))]


def _fit(
    lengths: Sequence[float], versions: Sequence[Sequence[float]], totals: Sequence[float]
) -> list[list[float]]:
    """Returns the part of each gap that is due to each cause.

    A replay may make some gaps longer, though it makes the step shorter. So the parts of gaps are fitted to
    the sums over all gaps, by iterative proportional fitting (Deming and Stephan, 1940).

    Args:
        lengths: the recorded length of each gap, which its parts add up to.
        versions: for each gap, its lengths as recorded and in each replay.
        totals: the sum over all gaps for each cause.
    """
    parts = []
    for length, own in zip(lengths, versions, strict=True):
        taken = [max(0.0, a - b) for a, b in pairwise(own)] + [own[-1]]
        parts.append([part + 1e-9 * length for part in taken])
    for _ in range(_MAX_FITS):
        columns = [sum(column) for column in zip(*parts, strict=True)]
        factors = [total / column if column else 0.0 for total, column in zip(totals, columns, strict=True)]
        parts = [[part * factor for part, factor in zip(own, factors, strict=True)] for own in parts]
        rows = [sum(own) for own in parts]
        if all(abs(row - length) <= 1e-6 * length for row, length in zip(rows, lengths, strict=True)):
            break
        parts = [
            [part * length / row if row else 0.0 for part in own]
            for own, row, length in zip(parts, rows, lengths, strict=True)
        ]
    return parts


_MAX_FITS = 100


def _gaps(
    schedule: Schedule, begins: Mapping[Action, float], ends: Mapping[Action, float], end: float
) -> list[tuple[int, float, float]]:
    """Returns the rank, begin and end of each gap; also of gaps without length."""

    def of_rank(rank: int) -> Iterator[tuple[int, float, float]]:
        now = 0.0
        for action in schedule.ranks[rank]:
            if action.kind not in TRANSFERS:
                yield rank, now, max(now, begins[action])
                now = max(now, ends[action])
        yield rank, now, max(now, end)

    return [gap for rank in range(len(schedule.ranks)) for gap in of_rank(rank)]


def _without_causes(phase: Phase, seconds: Mapping[Action, float]) -> list[dict[Action, float]]:
    """Returns the durations of a run without copies; also without recompute; Python; of equal stages."""
    python = phase.interpreted()
    copies = {action: 0.0 if action.kind in TRANSFERS else s for action, s in seconds.items()}
    recomputed = {action: 0.0 if action.kind is Kind.R else s for action, s in copies.items()}
    operators = {action: max(0.0, s - python.get(action, 0.0)) for action, s in recomputed.items()}
    return [copies, recomputed, operators, _equal_stages(operators)]


def _equal_stages(seconds: Mapping[Action, float]) -> dict[Action, float]:
    """Returns the durations if each stage took the mean time for the forward, and for the backward.

    The first stage runs as a B what others run as an I and a W.
    """
    num_stages = len({action.stage for action in seconds})
    sums: defaultdict[tuple[Kind, int], float] = defaultdict(float)
    for action, s in seconds.items():
        sums[action.kind, action.microbatch] += s / num_stages

    def equal(action: Action) -> float:
        m = action.microbatch
        inputs, weights = sums[Kind.I, m], sums[Kind.W, m]
        whole = sums[Kind.B, m] + inputs + weights
        part = inputs / (inputs + weights) if inputs + weights else 1.0
        backward = {Kind.B: whole, Kind.I: whole * part, Kind.W: whole * (1 - part)}
        return backward.get(action.kind, sums[action.kind, m])

    return {action: equal(action) for action in seconds}
