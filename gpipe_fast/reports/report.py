"""Reports: where the time of a recorded step goes, and what idle time is due to.

A stage's time is one of four, from the stamps of its events::

    busy       it runs a forward, a backward, or a part of one
    copying    it runs a SEND or a RECV
    waiting    it waits at a slot, or for its turn
    idle       none of these: before its first and after its last event, and between events

`gpipe_fast.reports.blame` finds the causes of the time in which a stage is not busy.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpipe_fast.reports import page
from gpipe_fast.reports.advice import Advice
from gpipe_fast.reports.blame import Gap, Phase, blame, gaps_of
from gpipe_fast.reports.events import kept_after
from gpipe_fast.reports.tables import Printed, Table, ms, plain, size
from gpipe_fast.reports.timeline import timeline, trace_events
from gpipe_fast.schedule import BACKWARD, TRANSFERS, Action, Kind, bubble

_FORMATS = (".html", ".json")


class StageTimes(NamedTuple):
    """How a stage spends the seconds of a step."""

    busy: float
    copying: float
    waiting: float
    idle: float


class StageSizes(NamedTuple):
    """Bytes of a stage's parameters and their gradients."""

    parameters: int
    gradients: int


class StageMemory(NamedTuple):
    """What a stage holds at most, in bytes.

    Attributes:
        parameters: its parameters, without buffers.
        gradients: their gradients after the step, as far as they are in ``.grad``.
        boundary: the boundary tensors that enter it, of all micro-batches that it keeps, at the peak; without
            those that wait at slots, and what autograd keeps for Python layers.
        saved: other tensors that it keeps for backwards, at the same time, with the same exception.
        scratch: the intermediates of its largest program.
    """

    parameters: int
    gradients: int
    boundary: int
    saved: int
    scratch: int

    @property
    def activations(self) -> int:
        """The bytes that depend on the mini-batch: boundary, saved and scratch."""
        return self.boundary + self.saved + self.scratch


class InPython(NamedTuple):
    """The layers of a stage that run in Python.

    Attributes:
        stage: the stage.
        layers: their names.
        seconds: what they take of the stage's busy time.
        cost: by how much a simulated step is shorter if they take as long as their operators alone.
    """

    stage: int
    layers: str
    seconds: float
    cost: float


@dataclass(frozen=True, repr=False)
class Report(Printed):
    """Where the time of a recorded step goes. ``print`` shows tables; notebooks show them as HTML.

    A step is what the engine runs: forward and backward, without what the caller does between them.

    Attributes:
        phases: the runs of the engine: one, or forward and backward.
        step: the seconds of the step.
        between: the seconds between forward and backward, in which the caller computes the loss; 0 if the
            step was one call.
        stages: the times of each stage, which add up to the step.
        recompute: the seconds of recomputes, which are busy time, summed over stages; Python layers recompute
            in their backwards, which is not counted.
        blame: the share of each cause in the time in which stages are not busy; they add up to 1.
        critical_path: the recorded actions that determine the time of the step, if nothing is lost.
        path_seconds: the seconds of these actions.
        busy_bound: the seconds of the busiest rank; no schedule is faster with this balance.
        gaps: the times in which a rank computes nothing, with what they are due to.
        memory: what each stage holds at most; empty if unknown.
        advice: changes that are predicted to gain, the best first; `GPipe.report` gives them.
        spread: the seconds of the fastest and of the slowest recorded step; empty if one step was recorded.
        python: the layers that run in Python, and what they cost.
        withheld: changes of which the recorded steps do not say whether, or how much, they gain.
        others: a line about other programs that need the processors; mostly empty.
        clock_error: as for `Recording`.
    """

    phases: tuple[Phase, ...]
    step: float
    between: float
    stages: tuple[StageTimes, ...]
    recompute: float
    blame: dict[str, float]
    critical_path: tuple[Action, ...]
    path_seconds: float
    busy_bound: float
    gaps: tuple[Gap, ...]
    memory: tuple[StageMemory, ...] = ()
    advice: tuple[Advice, ...] = ()
    spread: tuple[float, ...] = ()
    python: tuple[InPython, ...] = ()
    withheld: tuple[str, ...] = ()
    others: str = ""
    clock_error: float = 0.0

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.phases[0].schedule.num_microbatches

    @property
    def num_ranks(self) -> int:
        """The number of ranks: stages, unless some take turns on a device."""
        return len(self.phases[0].schedule.ranks)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they are not busy."""
        return 1 - sum(stage.busy for stage in self.stages) / (self.num_ranks * self.step)

    @property
    def bubble_of_equal_stages(self) -> float:
        """The bubble of fill-drain if all stages take the same time, (K-1)/(M+K-1)."""
        return bubble(len(self.stages), self.num_microbatches)

    @classmethod
    def of(
        cls, phases: Sequence[Phase], sizes: Sequence[StageSizes] = (), clock_error: float = 0.0
    ) -> Report:
        """Makes the report of the runs of one step.

        Args:
            phases: the runs.
            sizes: what each stage holds all the time; empty if unknown.
            clock_error: as for `Recording`.
        """
        windows = [phase.window for phase in phases]
        schedule = phases[0].schedule
        each = [[_stage_times(phase, stage) for phase in phases] for stage in range(schedule.num_stages)]
        times = tuple(StageTimes(*map(sum, zip(*runs, strict=True))) for runs in each)
        seconds = [phase.seconds() for phase in phases]
        replays = [phase.replay() for phase in phases]
        busy_of: defaultdict[int, float] = defaultdict(float)
        for stage, own in enumerate(times):
            busy_of[schedule.rank_of[stage]] += own.busy
        gaps = tuple(gap for phase in phases for gap in gaps_of(phase))
        return cls(
            phases=tuple(phases),
            step=sum(end - begin for begin, end in windows),
            between=max(0.0, windows[-1][0] - windows[0][1]) if len(windows) > 1 else 0.0,
            stages=times,
            recompute=sum(s for own in seconds for action, s in own.items() if action.kind is Kind.R),
            blame=blame(gaps),
            critical_path=tuple(action for replay in replays for action in replay.critical_path),
            path_seconds=sum(replay.time for replay in replays),
            busy_bound=max(busy_of.values()),
            gaps=gaps,
            memory=_memory(phases, sizes),
            python=_in_python(phases),
            clock_error=clock_error,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures as numbers, strings, lists and dicts, for JSON. Times are in seconds."""
        names = "step between num_microbatches bubble bubble_of_equal_stages stages recompute blame"
        names += " path_seconds busy_bound clock_error memory spread python withheld"
        found: dict[str, Any] = plain({name: getattr(self, name) for name in names.split()})
        found["critical_path"] = [str(action) for action in self.critical_path]
        found["advice"] = [
            {"what": a.what, "code": a.code, "predicted": a.predicted, "measured": a.measured}
            for a in self.advice
        ]
        return found

    def save(self, path: str | os.PathLike[str], *, title: str = "") -> None:
        """Writes the step to a file, whose name says what it becomes.

        - ``.html``: a page that needs no network: its timeline zooms and saves its picture; and tables.
        - ``.json``: a trace for ui.perfetto.dev and chrome://tracing: a thread for each stage, arrows from
          each SEND to its RECV, and a counter of the bytes that each stage keeps.

        Args:
            path: the file.
            title: a line above the page.

        Raises:
            ValueError: the name has another ending.
            OSError: the file cannot be written.
        """
        is_page, found = format_of(path) == ".html", self.timeline()
        content = self._page(found, title) if is_page else json.dumps(trace_events(found))
        Path(path).write_text(content, encoding="utf-8")

    def _page(self, found: dict[str, Any], title: str) -> str:
        tables: list[dict[str, Any]] = []
        for table in self.tables():
            tables.append({"caption": table.caption, "headers": table.headers, "rows": table.rows})
            if "code" in table.headers:
                tables[-1]["code"] = [table.headers.index("code")]
        data = found | {"headline": "\n".join([self.headline(), *self._notes()]), "tables": tables}
        return page.report_page(data, title or "A recorded step")

    def timeline(self) -> dict[str, Any]:
        """Returns the rows, blocks and arrows of pages and traces, as `page.report_page` says."""
        return timeline(self.phases, self.gaps, self.critical_path)

    def headline(self) -> str:
        """Returns the line above tables and pages."""
        ideal = f"(K-1)/(M+K-1) = {self.bubble_of_equal_stages:.1%} for equal stages"
        what = "step" if any(action.kind in BACKWARD for action in self.critical_path) else "forward"
        return (
            f"K = {len(self.stages)} stages, M = {self.num_microbatches} micro-batches: "
            f"{what} {self.step * 1e3:.1f} ms{self._rounds()}, bubble {self.bubble:.1%}, {ideal}"
            + (f"; loss {self.between * 1e3:.1f} ms" if len(self.phases) > 1 else "")
        )

    def _rounds(self) -> str:
        return " ({:.1f} to {:.1f})".format(*(s * 1e3 for s in self.spread)) if self.spread else ""

    def tables(self) -> list[Table]:
        """Returns the tables that ``print`` shows."""
        busy = sum(stage.busy for stage in self.stages)
        figures = [
            ["step, if nothing is lost (critical path)", ms(self.path_seconds)],
            ["step, if nothing ever waits (busiest rank)", ms(self.busy_bound)],
            ["bubble, if nothing is lost", f"{1 - busy / (self.num_ranks * self.path_seconds):.1%}"],
            ["recompute, of the busy time", f"{self.recompute / busy:.1%}"],
        ]
        if self.clock_error:
            figures.append(["error of times between processes, at most", ms(self.clock_error)])
        of_stages = [
            [str(stage), *map(ms, own), f"{own.busy / self.step:.1%}"]
            for stage, own in enumerate(self.stages)
        ]
        of_causes = [
            [cause, f"{share:.1%}", f"{share * self.bubble:.1%}"] for cause, share in self.blame.items()
        ]
        tables = [
            Table("Figures", ["figure", "ms or share"], figures),
            Table("Stages", ["stage", "busy ms", "copying ms", "waiting ms", "idle ms", "busy"], of_stages),
            Table("Why ranks compute nothing", ["cause", "share", "of the step"], of_causes),
        ]
        if self.python:
            rows = [[str(p.stage), p.layers, ms(p.seconds), ms(p.cost)] for p in self.python]
            headers = ["stage", "layers in Python", "busy ms", "of the step ms"]
            tables.append(
                Table("Layers in Python, and what the interpreter costs", headers, rows, headers[1:2])
            )
        if self.memory:
            rows = [[str(stage), *map(size, own)] for stage, own in enumerate(self.memory)]
            tables.append(Table("Memory", ["stage", *StageMemory._fields], rows))
        return [*tables, *([self._advice_table()] if self.advice else [])]

    def _advice_table(self) -> Table:
        headers = ["change", "code", "predicted ms", "gain"]
        least = ["" if advice.settings else "at least " for advice in self.advice]
        each = zip(self.advice, least, strict=True)
        rows = [[a.what, a.code, ms(a.predicted), f"{text}{self._gain(a.predicted)}"] for a, text in each]
        measured = self.advice[0].measured
        if measured is not None:
            headers += ["measured ms", "measured gain"]
            rows = [[*row, "", ""] for row in rows]
            rows[0][-2:] = [ms(measured), self._gain(measured)]
        return Table("Advice", headers, rows)

    def _gain(self, seconds: float) -> str:
        return f"{1 - seconds / self.step:.1%}"

    def __repr__(self) -> str:
        return f"<Report: {self.headline()}>"

    def _parts(self) -> Iterator[str | Table]:
        yield f"Report: {self.headline()}"
        yield from self._notes()
        for table in self.tables():
            yield from (table.caption, table._replace(caption=""))

    def _notes(self) -> Iterator[str]:
        """Yields what limits the figures: other programs, and changes without a prediction."""
        if self.others:
            yield f"{self.others} The causes but host are those without them."
        if self.withheld:
            yield (
                f"No gain is predicted of {'; '.join(self.withheld)}: the steps differ too much, or take "
                "much longer than their actions alone, as while other programs run."
            )


def format_of(path: str | os.PathLike[str]) -> str:
    """Returns the ending of the file that a report is saved to.

    Raises:
        ValueError: a report is not saved to such files.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _FORMATS:
        raise ValueError(
            f"a report is saved as {', '.join(_FORMATS)}: the path must end in one of them, got {str(path)!r}"
        )
    return suffix


def _stage_times(phase: Phase, stage: int) -> StageTimes:
    """Returns a stage's times within a run, each from its own stamps: idle are the gaps between events."""
    begin, end = phase.window
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


def _memory(phases: Sequence[Phase], sizes: Sequence[StageSizes]) -> tuple[StageMemory, ...]:
    """Returns what each stage holds at most."""
    found = []
    for stage, own in enumerate(sizes):
        events = [e for phase in phases for e in phase.events.values() if e.action.stage == stage]
        peak = max(((boundary, saved) for _, boundary, saved in kept_after(events)), key=sum)
        scratch = max(event.scratch_bytes for event in events)
        found.append(StageMemory(own.parameters, own.gradients, *peak, scratch))
    return tuple(found)


def _in_python(phases: Sequence[Phase]) -> tuple[InPython, ...]:
    """Returns what layers in Python cost, by stage."""
    whole, found = sum(phase.replay().time for phase in phases), []
    for stage in sorted({each.action.stage for phase in phases for each in phase.python}):
        own = [each for phase in phases for each in phase.python if each.action.stage == stage]
        names = ", ".join(dict.fromkeys(each.name for each in sorted(own, key=lambda each: each.layer)))
        without = sum(phase.replay(phase.interpreted(stage)).time for phase in phases)
        found.append(InPython(stage, names, sum(each.seconds for each in own), whole - without))
    return tuple(found)
