"""Reports: where the time of a recorded step goes, and what idle time is due to.

A stage's time is one of four, from the stamps of its events::

    busy       it runs a forward, a backward, or a part of one
    copying    it runs a SEND or a RECV
    waiting    it waits at a slot, or for its turn
    idle       none of these: before its first and after its last event, and between events

The time in which stages are not busy is blamed on causes by replays of the recorded schedule with the
recorded durations, where one cause after the other is taken away. What a replay gains is due to its cause::

    recorded ─ host ─▶ replayed ─ transfers ─▶ no copies ─ recompute ─▶ no R ─ imbalance ─▶ equal stages
                                                                        what is left: fill and drain
"""

from __future__ import annotations

import html
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate

from gpipe_fast.runtime.advice import Advice
from gpipe_fast.runtime.events import Event
from gpipe_fast.schedule import TRANSFERS, Action, Kind, Schedule, Simulation, bubble

CAUSES = ("fill and drain", "imbalance", "transfer", "recompute", "host")
"""What idle time is blamed on.

- fill and drain: stages have no work at the begin and the end of a schedule, and where its directions meet.
- imbalance: stages take different times.
- transfer: stages copy boundary tensors, or wait for them.
- recompute: others wait for recomputes, beyond what these take themselves.
- host: the rest: too few processors, layers in Python, and the engine itself.
"""


class StageTimes(NamedTuple):
    """How a stage spends the seconds of a step."""

    busy: float
    copying: float
    waiting: float
    idle: float


class Phase(NamedTuple):
    """One run of the engine: the schedule of its actions, and their events with the waits before them."""

    schedule: Schedule
    events: Mapping[Action, Event]
    waits: Sequence[Event]


@dataclass(frozen=True)
class Report:
    """Where the time of a recorded step goes. ``print`` shows tables; notebooks show them as HTML.

    A step is what the engine runs: forward and backward, without what the caller does between them.

    Attributes:
        step: the seconds of the step.
        between: the seconds between forward and backward, in which the caller computes the loss; 0 if the
            step was one call.
        num_microbatches: M.
        stages: the times of each stage, which add up to the step.
        recompute: the seconds of recomputes, which are busy time, summed over stages.
        blame: the share of each cause in the time in which stages are not busy; they add up to 1.
        critical_path: the recorded actions that determine the time of the step, if nothing is lost.
        path_seconds: the seconds of these actions.
        busy_bound: the seconds of the busiest rank, below which no schedule gets with this balance.
        num_ranks: the number of ranks: stages, unless some take turns on a device.
        events: the events, by stage.
        advice: changes that are predicted to gain, the best first; `GPipe.report` gives them.
    """

    step: float
    between: float
    num_microbatches: int
    stages: tuple[StageTimes, ...]
    recompute: float
    blame: dict[str, float]
    critical_path: tuple[Action, ...]
    path_seconds: float
    busy_bound: float
    num_ranks: int
    events: tuple[tuple[Event, ...], ...]
    advice: tuple[Advice, ...] = ()

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they are not busy."""
        return 1 - sum(stage.busy for stage in self.stages) / (self.num_ranks * self.step)

    @property
    def bubble_of_equal_stages(self) -> float:
        """The bubble of fill-drain if all stages take the same time, (K-1)/(M+K-1)."""
        return bubble(len(self.stages), self.num_microbatches)

    @classmethod
    def of(cls, phases: Sequence[Phase], num_stages: int, events: tuple[tuple[Event, ...], ...]) -> Report:
        """Makes the report of the runs of one step."""
        windows = [_window(phase.events.values()) for phase in phases]
        step = sum(end - begin for begin, end in windows)
        times = [StageTimes(0.0, 0.0, 0.0, 0.0)] * num_stages
        for phase, window in zip(phases, windows, strict=True):
            times = [
                StageTimes(
                    *(a + b for a, b in zip(times[stage], _stage_times(phase, stage, window), strict=True))
                )
                for stage in range(num_stages)
            ]
        replays = [Simulation.of(phase.schedule, _duration_of(phase)) for phase in phases]
        ranks = phases[0].schedule.rank_of
        busy_of: defaultdict[int, float] = defaultdict(float)
        for stage, own in enumerate(times):
            busy_of[ranks[stage]] += own.busy
        return cls(
            step=step,
            between=max(0.0, windows[-1][0] - windows[0][1]) if len(windows) > 1 else 0.0,
            num_microbatches=phases[0].schedule.num_microbatches,
            stages=tuple(times),
            recompute=sum(
                _duration_of(phase)(action)
                for phase in phases
                for action in phase.events
                if action.kind is Kind.R
            ),
            blame=_blame(phases, step, len(busy_of)),
            critical_path=tuple(action for replay in replays for action in replay.critical_path),
            path_seconds=sum(replay.time for replay in replays),
            busy_bound=max(busy_of.values()),
            num_ranks=len(busy_of),
            events=events,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures as numbers, strings, lists and dicts, for JSON. Times are in seconds."""
        return {
            "step": self.step,
            "between": self.between,
            "num_microbatches": self.num_microbatches,
            "bubble": self.bubble,
            "bubble_of_equal_stages": self.bubble_of_equal_stages,
            "stages": [stage._asdict() for stage in self.stages],
            "recompute": self.recompute,
            "blame": dict(self.blame),
            "critical_path": [str(action) for action in self.critical_path],
            "path_seconds": self.path_seconds,
            "busy_bound": self.busy_bound,
            "advice": [
                {"what": a.what, "code": a.code, "predicted": a.predicted, "measured": a.measured}
                for a in self.advice
            ],
        }

    def trace(self) -> dict[str, Any]:
        """Returns the events in the trace event format, which Perfetto and chrome://tracing open.

        A stage is a thread; arrows lead from each SEND to its RECV. Times are in microseconds.
        """
        origin = min((event.begin for own in self.events for event in own), default=0.0)

        def micros(seconds: float) -> float:
            return (seconds - origin) * 1e6

        found: list[dict[str, Any]] = []
        for stage, own in enumerate(self.events):
            name = {
                "ph": "M",
                "pid": 0,
                "tid": stage,
                "name": "thread_name",
                "args": {"name": f"stage {stage}"},
            }
            found.append(name)
            for event in own:
                kind = "wait" if event.is_wait else event.action.kind.value
                place = {"pid": 0, "tid": stage, "ts": micros(event.begin)}
                label = f"wait for {event.action}" if event.is_wait else str(event.action)
                length = (event.end - event.begin) * 1e6
                found.append({"ph": "X", "name": label, "cat": kind, "dur": length, **place})
        found += self._arrows(micros)
        return {"traceEvents": found, "displayTimeUnit": "ms"}

    def _arrows(self, micros: Callable[[float], float]) -> list[dict[str, Any]]:
        by_name = {
            (event.run, event.action): event for own in self.events for event in own if not event.is_wait
        }
        found: list[dict[str, Any]] = []
        for (run, action), receive in by_name.items():
            if action.kind not in (Kind.RECV_F, Kind.RECV_B):
                continue
            is_forward = action.kind is Kind.RECV_F
            kind, stage = (Kind.SEND_F, action.stage - 1) if is_forward else (Kind.SEND_B, action.stage + 1)
            send = by_name.get((run, Action(stage, kind, action.microbatch)))
            if send is not None:
                common = {"cat": "transfer", "name": "boundary", "id": len(found) // 2, "pid": 0}
                found.append({"ph": "s", "tid": stage, "ts": micros(send.begin), **common})
                found.append(
                    {"ph": "f", "bp": "e", "tid": action.stage, "ts": micros(receive.begin), **common}
                )
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace to a file whose name ends in ``.json``.

        Raises:
            ValueError: the name has another ending.
            OSError: the file cannot be written.
        """
        if Path(path).suffix.lower() != ".json":
            raise ValueError(
                f"a report is saved as a trace in JSON: the path must end in .json, got {str(path)!r}; for a "
                "picture, use gpipe_fast.picture.draw"
            )
        Path(path).write_text(json.dumps(self.trace()), encoding="utf-8")

    def _tables(self) -> tuple[str, list[tuple[list[str], list[list[Any]]]]]:
        """Returns the headline, and the headers and rows of the tables."""
        parts = [
            f"step {self.step * 1e3:.3f} ms",
            f"{len(self.stages)} stages",
            f"{self.num_microbatches} micro-batches",
            f"bubble {self.bubble:.1%}, of equal stages {self.bubble_of_equal_stages:.1%}",
            f"critical path {self.path_seconds * 1e3:.3f} ms",
            f"busiest rank {self.busy_bound * 1e3:.3f} ms",
        ]
        if self.recompute:
            busy = sum(stage.busy for stage in self.stages)
            parts.append(f"recompute {self.recompute / busy:.1%} of busy time")
        if self.between:
            parts.append(f"besides {self.between * 1e3:.3f} ms between forward and backward")
        of_stages = [
            [stage, *(f"{x * 1e3:.3f}" for x in own), f"{own.busy / self.step:.1%}"]
            for stage, own in enumerate(self.stages)
        ]
        of_causes = [
            [cause, f"{share:.1%}", f"{share * self.bubble:.1%}"] for cause, share in self.blame.items()
        ]
        tables: list[tuple[list[str], list[list[Any]]]] = [
            (["stage", "busy ms", "copying ms", "waiting ms", "idle ms", "busy"], of_stages),
            (["not busy because of", "share", "of the step"], of_causes),
        ]
        if self.advice:
            headers = ["advice", "code", "predicted ms", "gain"]
            rows = [
                [a.what, a.code, f"{a.predicted * 1e3:.3f}", self._gain(a.predicted)] for a in self.advice
            ]
            if self.advice[0].measured is not None:
                headers += ["measured ms", "gain"]
                first = self.advice[0].measured
                rows = [[*row, "", ""] for row in rows]
                rows[0][-2:] = [f"{first * 1e3:.3f}", self._gain(first)]
            tables.append((headers, rows))
        return ", ".join(parts), tables

    def _gain(self, seconds: float) -> str:
        return f"{1 - seconds / self.step:.1%}"

    def __str__(self) -> str:
        headline, tables = self._tables()
        shown = (
            tabulate(
                rows, headers, tablefmt="simple", disable_numparse=True, colalign=["left"] + ["right"] * n
            )
            for headers, rows in tables
            for n in [len(headers) - 1]
        )
        return "\n\n".join([f"Report: {headline}", *shown])

    def _repr_html_(self) -> str:
        headline, tables = self._tables()
        return "\n".join(
            [f"<p>{html.escape(headline)}</p>"]
            + [tabulate(rows, headers, tablefmt="html", disable_numparse=True) for headers, rows in tables]
        )


def _window(events: Iterable[Event]) -> tuple[float, float]:
    own = list(events)
    return min(event.begin for event in own), max(event.end for event in own)


def _stage_times(phase: Phase, stage: int, window: tuple[float, float]) -> StageTimes:
    """Returns a stage's times within a run, each from its own stamps: idle are the gaps between events."""
    begin, end = window
    own = [(event, event.begin, event.end) for action, event in phase.events.items() if action.stage == stage]
    own += [
        (event, max(event.begin, begin), min(event.end, end))
        for event in phase.waits
        if event.action.stage == stage and event.begin < end and event.end > begin
    ]
    sums: defaultdict[str, float] = defaultdict(float)
    now = begin
    for event, first, last in sorted(own, key=lambda each: each[1:]):
        kind = "copying" if event.action.kind in TRANSFERS else "busy"
        sums["waiting" if event.is_wait else kind] += last - first
        sums["idle"] += max(0.0, first - now)
        now = max(now, last)
    sums["idle"] += max(0.0, end - now)
    return StageTimes(**{name: sums[name] for name in StageTimes._fields})


def _duration_of(phase: Phase) -> Callable[[Action], float]:
    return lambda action: phase.events[action].end - phase.events[action].begin


def _blame(phases: Sequence[Phase], step: float, num_ranks: int) -> dict[str, float]:
    """Returns the share of each cause in the time in which stages are not busy."""
    steps = [step] + [0.0] * 4  # as recorded, replayed, without copies, without recompute, with equal stages
    busy = recompute = 0.0
    for phase in phases:
        seconds = {action: _duration_of(phase)(action) for action in phase.events}
        busy += sum(s for action, s in seconds.items() if action.kind not in TRANSFERS)
        recompute += sum(s for action, s in seconds.items() if action.kind is Kind.R)
        for index, replayed in enumerate(_without_causes(seconds), 1):
            steps[index] += phase.schedule.critical_path(replayed.__getitem__)
    gains = dict(zip(("host", "transfer", "recompute", "imbalance"), _differences(steps), strict=True))
    idle = num_ranks * step - busy
    lost = {cause: max(0.0, num_ranks * gain) for cause, gain in gains.items()}
    lost["recompute"] = max(0.0, lost["recompute"] - recompute)  # which is busy time
    total = sum(lost.values())
    if total > idle > 0:
        lost = {cause: value * idle / total for cause, value in lost.items()}
    lost["fill and drain"] = max(0.0, idle - sum(lost.values()))
    return {cause: lost[cause] / idle if idle > 0 else 0.0 for cause in CAUSES}


def _without_causes(seconds: dict[Action, float]) -> list[dict[Action, float]]:
    """Returns the durations of a run as recorded; without copies; also without recompute; of equal stages."""
    copies = {action: 0.0 if action.kind in TRANSFERS else s for action, s in seconds.items()}
    recomputed = {action: 0.0 if action.kind is Kind.R else s for action, s in copies.items()}
    return [seconds, copies, recomputed, _equal_stages(recomputed)]


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


def _differences(values: Sequence[float]) -> list[float]:
    return [a - b for a, b in pairwise(values)]
