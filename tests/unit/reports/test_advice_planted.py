"""Steps with one planted problem: the report blames its cause, and the advice mends it as predicted.

The steps are simulated, on a quiet machine and on one that makes some actions and some rounds longer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest

from gpipe_fast.recording import Event
from gpipe_fast.reports.advice import (
    Alternative,
    Costs,
    Found,
    LayerCosts,
    Measurements,
    improvements,
)
from gpipe_fast.reports.blame import Phase
from gpipe_fast.reports.events import PythonTime
from gpipe_fast.reports.report import Report
from gpipe_fast.schedule import TRANSFERS, Action, Kind, Schedule, schedule_for
from gpipe_fast.schedule.simulation import Simulation, recomputed_by

BATCH, ROUNDS = 64, 10


@dataclass(frozen=True)
class Step:
    """A step of layers whose costs are known. Its settings have the names of those of a `GPipe`.

    Attributes:
        each: the milliseconds of each layer's forward for one sample; a backward takes twice as long.
        fixed: those of each layer's forward for any micro-batch.
        kilobytes: what crosses behind each layer for one sample; a kilobyte takes a microsecond.
        python: what layers take in the interpreter, by their numbers, in each forward.
        processors: what threads share; more of them make each other slower.
    """

    each: Sequence[float] = (0.1,) * 8
    fixed: float = 0.02
    kilobytes: Sequence[float] = (1,) * 8
    python: Sequence[tuple[int, float]] = ()
    processors: int = 4
    balance: Sequence[int] = (4, 4)
    chunks: int = 16
    checkpoint: str = "never"
    schedule: str = "zb-h1"
    threads_per_stage: int = 2

    def seconds(self, action: Action) -> float:
        """Returns the true seconds of an action."""
        ends, stage, size = list(accumulate(self.balance)), action.stage, BATCH / self.chunks
        if action.kind in TRANSFERS:
            behind = {Kind.SEND_F: stage, Kind.SEND_B: stage - 1}.get(action.kind)
            return 0.0 if behind is None else 1e-6 * size * self.kilobytes[ends[behind] - 1]
        own = range(ends[stage] - self.balance[stage], ends[stage])
        forward = sum(self.each[i] * size + self.fixed for i in own)
        threads = self.threads_per_stage * len(self.balance)
        slower = max(1.0, threads / self.processors)
        share = {Kind.F: 1, Kind.R: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}[action.kind]
        python = sum(ms for i, ms in self.python if i in own) if action.kind in (Kind.F, Kind.R) else 0
        return 1e-3 * (share * forward * slower + python)

    def whole(self) -> Schedule:
        recomputed = recomputed_by(self.checkpoint, self.chunks)
        return schedule_for(self.schedule, len(self.balance), self.chunks, recomputed=recomputed)

    def time(self) -> float:
        return Simulation.of(self.whole(), self.seconds).time

    def layers(self, rng: random.Random, error: float) -> LayerCosts:
        """Returns what measures of single layers give, each with an error of at most this share."""
        size, python = BATCH / self.chunks, dict(self.python)
        seconds = [3e-3 * (1 + rng.uniform(0, error)) * (each * size + self.fixed) for each in self.each]
        return LayerCosts(
            [own + 1e-3 * python.get(i, 0) for i, own in enumerate(seconds)],
            [int(1024 * size * each) for each in self.kilobytes],
        )


class Machine:
    """Records steps. A loaded machine makes a tenth of the actions longer, two rounds, and some layers."""

    def __init__(self, seed: int, loaded: bool) -> None:
        self._random, self._loaded = random.Random(seed), loaded

    def record(self, step: Step) -> tuple[list[float], Costs, Report]:
        found, schedule = [], step.whole()
        slow = self._random.sample(range(ROUNDS), 3) if self._loaded else []
        for number in range(ROUNDS):
            durations = {a: self._longer(step.seconds(a), number in slow) for a in schedule.order()}
            found.append(Simulation.of(schedule, durations.__getitem__))
        events = [{a: Event(a, False, own.begins[a], own.ends[a]) for a in own.ends} for own in found]
        ends = list(accumulate(step.balance))
        python = [
            PythonTime(a, i, f"layer {i}", step.seconds(a), step.seconds(a) - 1e-3 * ms, 0.0)
            for i, ms in step.python
            for a in schedule.order()
            if a.kind in (Kind.F, Kind.R) and a.stage == next(s for s, end in enumerate(ends) if i < end)
        ]
        costs = Costs.of([schedule], events, [python] * ROUNDS)
        middle = sorted(range(ROUNDS), key=lambda i: found[i].time)[ROUNDS // 2]
        report = Report.of([Phase(schedule, events[middle], [], python, costs.seconds)])
        return sorted(own.time for own in found), costs, report

    def beside(self, step: Step, other: Step, number: int, is_expected: bool = False) -> Alternative:
        ratios = [self.record(other)[0][2] / self.record(step)[0][2] for _ in range(2)]
        return Alternative(number, self.record(other)[1], ratios, is_expected)

    def _longer(self, seconds: float, slow_round: bool) -> float:
        seconds *= self._random.uniform(0.99, 1.01)
        if not self._loaded:
            return seconds
        return seconds * (1.5 if self._random.random() < 0.1 else 1) * (1.3 if slow_round else 1)

    def diagnose(self, step: Step) -> tuple[Report, Found]:
        steps, costs, report = self.record(step)
        layers = [step.layers(self._random, 0.2 if self._loaded else 0.02) for _ in range(2)]
        threads = max(1, step.processors // len(step.balance))
        with_threads = replace(step, threads_per_stage=threads)
        fewer = threads < step.threads_per_stage
        found = improvements(
            report.step,
            steps[2],
            costs,
            schedule=step.schedule,
            checkpoint=step.checkpoint,
            measured=Measurements(
                chunks=lambda number: (
                    self.beside(step, replace(step, chunks=number), number) if 1 <= number <= BATCH else None
                ),
                threads=lambda: self.beside(step, with_threads, threads, True) if fewer else None,
                layers=lambda: (layers, step.balance),
            ),
        )
        return report, found


GOOD = Step()
# The step, the cause that explains most idle time (None: any), and the settings of the first advice.
PROBLEMS: dict[str, tuple[Step, str | None, dict[str, object]]] = {
    "a slow layer": (Step(each=(0.1,) * 7 + (0.5,)), "imbalance", {"balance": [6, 2]}),
    "an unbalanced model": (Step(balance=(2, 6)), "imbalance", {"balance": [4, 4]}),
    "few micro-batches": (Step(chunks=2, balance=(2,) * 4, processors=8), "fill and drain", {"chunks": 8}),
    "a needless recompute": (Step(checkpoint="always"), None, {"checkpoint": "never"}),
    "a layer in Python": (Step(python=((1, 4.0),)), "Python", {}),
    "too many threads": (Step(threads_per_stage=8), None, {"threads_per_stage": 2}),
    "a fat boundary": (
        Step(kilobytes=(1, 1, 1, 1500, 1, 1, 1, 1)),
        "transfer",
        {"balance": [5, 3]},
    ),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("loaded", [False, True], ids=["quiet", "loaded"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_cause_and_the_advice(name: str, loaded: bool, seed: int) -> None:
    step, cause, settings = PROBLEMS[name]
    report, found = Machine(seed, loaded).diagnose(step)
    if cause is not None:
        causes = {name: share for name, share in report.blame.items() if name != "host"}
        assert max(causes, key=causes.__getitem__) == cause
    if loaded and not found.advice:
        assert any(word in each for word in (*settings, "Python") for each in found.withheld)
        return
    first = found.advice[0]
    assert first.settings.keys() == settings.keys()
    mended, best = (
        replace(step, **own) if own else replace(step, python=()) for own in (first.settings, settings)
    )
    assert mended.time() <= 1.05 * best.time()
    # A loaded machine is slower with any settings, so what the gain leaves is compared.
    assert first.predicted / report.step == pytest.approx(mended.time() / step.time(), rel=0.15)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("loaded", [False, True], ids=["quiet", "loaded"])
def test_a_good_step_gets_no_advice(loaded: bool, seed: int) -> None:
    """Eight equal layers are not moved, and no number of micro-batches is offered for what the load did."""
    assert [each.code for each in Machine(seed, loaded).diagnose(GOOD)[1].advice] == []
