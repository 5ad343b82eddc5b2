"""Advice: which change of a setting would make a recorded step faster, by simulations with its durations."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, permutations, product
from statistics import median
from typing import Any, NamedTuple

from gpipe_fast.balance.partition import balance_by_cost
from gpipe_fast.layers.batchnorm import SMALLER_BATCHES
from gpipe_fast.lower.checkpoint import CheckpointSetting, checkpoint_policy
from gpipe_fast.reports.events import Event, PythonTime
from gpipe_fast.schedule import (
    TRANSFERS,
    Action,
    Kind,
    Schedule,
    ScheduleChoice,
    schedule_for,
)

# Changes that are predicted to gain a smaller share of the step are left out.
LEAST_GAIN = 0.03
# By how much predictions with parts of the measurements may differ, relative to the predicted time.
_MAX_ERROR = 0.15
_MAX_ADVICE = 3
_COMPUTATIONS = (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W)
# The schedules that are tried; 'interleaved' needs another balance.
_SCHEDULES = ("gpipe", "1f1b", "zb-h1")


@dataclass(frozen=True)
class Advice:
    """A change that would make a step faster.

    Attributes:
        what: what changes, in words.
        settings: the new values of attributes of the model; empty if the change is one of its layers.
        predicted: the predicted seconds of a step; at most, if `settings` is empty: C++ also calls operators
            and backwards in less time than Python.
        measured: the measured seconds of a step; None if it was not measured.
        of_a_new: whether a new pipeline is needed, because those of this one cannot be set.
    """

    what: str
    settings: dict[str, Any]
    predicted: float
    measured: float | None = None
    of_a_new: bool = False

    @property
    def code(self) -> str:
        """The change as a line of Python; empty if it is one of a layer."""
        if self.of_a_new:
            return f"GPipe(..., {', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"
        return as_code(self.settings)


def as_code(settings: Mapping[str, Any]) -> str:
    """Returns settings of a model as a line of Python."""
    return "; ".join(f"model.{name} = {value!r}" for name, value in sorted(settings.items()))


@dataclass(frozen=True)
class Costs:
    """The durations of a step's actions.

    What else runs on the machine makes actions longer, never shorter, so each has the shortest of its
    recorded durations.

    Attributes:
        phases: the schedule of each engine run.
        seconds: the duration of each action.
        transit: the seconds from the end of each SEND until the tensor has arrived; by default 0.
        python: the seconds of actions that the interpreter takes in layers in Python.
        recomputed: the seconds of backwards in which such layers recompute, for which R takes no time.
        python_layers: what these layers are called, by their indices.
        rounds: the durations in each recorded step.
        processors: the number of stages that can compute at the same time.
    """

    phases: Sequence[Schedule]
    seconds: Mapping[Action, float]
    transit: Mapping[Action, float] = field(default_factory=dict)
    python: Mapping[Action, float] = field(default_factory=dict)
    recomputed: Mapping[Action, float] = field(default_factory=dict)
    python_layers: Mapping[int, str] = field(default_factory=dict)
    rounds: Sequence[Mapping[Action, float]] = ()
    processors: float = math.inf

    @classmethod
    def of(
        cls,
        phases: Sequence[Schedule],
        recorded: Sequence[Mapping[Action, Event]],
        python: Sequence[Sequence[PythonTime]] = (),
        processors: float = math.inf,
    ) -> Costs:
        """Makes the costs of steps with the same schedule.

        Args:
            phases: the schedule of each engine run.
            recorded: the events of each step.
            python: the times of layers in Python in each step.
            processors: the number of stages that can compute at the same time.
        """
        rounds = [{a: event.end - event.begin for a, event in each.items()} for each in recorded]
        transit = _shortest([{a: event.transit for a, event in each.items()} for each in recorded])
        return cls(
            phases,
            _shortest(rounds),
            {a: s for a, s in transit.items() if s > 0},
            _shortest([_sums(own, lambda each: each.seconds - each.operators) for own in python]),
            _shortest([_sums(own, lambda each: each.recompute) for own in python]),
            {each.layer: each.name for own in python for each in own},
            rounds,
            processors,
        )

    def halves(self) -> list[Costs]:
        """Returns the costs of every other recorded step, and of the rest; these alone without rounds."""
        parts = [own for own in (self.rounds[::2], self.rounds[1::2]) if own]
        return [replace(self, seconds=_shortest(own), rounds=()) for own in parts] or [self]

    @property
    def num_stages(self) -> int:
        """K."""
        return self.phases[0].num_stages

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.phases[0].num_microbatches

    @property
    def has_backward(self) -> bool:
        """Whether there are backwards."""
        return any(action.kind in (Kind.B, Kind.I) for action in self.seconds)

    def time(
        self,
        phases: Sequence[Schedule] | None = None,
        change: Callable[[Action, float], float] = lambda _, seconds: seconds,
    ) -> float:
        """Returns the simulated seconds of a step.

        Args:
            phases: the schedules; by default the recorded ones.
            change: returns the changed duration of an action.
        """

        def seconds(action: Action) -> float:
            return change(action, self._seconds(action))

        def transit(send: Action) -> float:
            return change(send, self.transit.get(send, 0.0))

        def longest(phase: Schedule) -> float:
            work = sum(seconds(action) for action in phase.order() if action.kind not in TRANSFERS)
            return max(*phase.times(seconds, transit).values(), work / self.processors)

        return sum(map(longest, self.phases if phases is None else phases))

    def without_recompute(self) -> float:
        """Returns the simulated seconds of a step whose recomputes take no time."""

        def change(action: Action, seconds: float) -> float:
            return 0.0 if action.kind is Kind.R else max(0.0, seconds - self.recomputed.get(action, 0.0))

        return self.time(change=change)

    def without_python(self) -> float:
        """Returns the simulated seconds of a step whose layers spend no time in the interpreter."""
        return self.time(change=lambda action, seconds: max(0.0, seconds - self.python.get(action, 0.0)))

    def as_recorded(self, layers: LayerCosts, present: Sequence[int]) -> LayerCosts:
        """Returns the costs of layers with the seconds of each in the step: its share of what its stage took.

        Layers in Python get what their stage takes beyond its other layers, as measured one by one.
        """
        found: list[float] = []
        for stage, (size, end) in enumerate(zip(present, accumulate(present), strict=True)):
            own = range(end - size, end)
            seconds = {i: max(1e-12, layers.seconds[i]) for i in own}
            python = [i for i in own if i in self.python_layers]
            rest = self.of_all_kinds(stage) - sum(seconds[i] for i in own if i not in python)
            scaled = python if python and rest > sum(seconds[i] for i in python) else own
            whole = rest if scaled is python else self.of_all_kinds(stage)
            factor = whole / sum(seconds[i] for i in scaled)
            found += [seconds[i] * (factor if i in scaled else 1.0) for i in own]
        return layers._replace(seconds=found)

    def of_all_kinds(self, stage: int) -> float:
        """Returns the seconds in which a stage computes for one micro-batch."""
        return sum(self.of_a_microbatch(kind, stage) for kind in _COMPUTATIONS)

    def with_balance(self, layers: LayerCosts, present: Sequence[int], other: Sequence[int]) -> float:
        """Returns the simulated seconds of a step with another balance.

        Durations of stages are scaled by the sums of their layers' times, and those of transfers by the bytes
        that cross.

        Args:
            layers: the costs of the layers, as `as_recorded` returns them.
            present: the recorded balance.
            other: the other balance.
        """
        stages = [a / max(b, 1e-12) for a, b in zip(layers.times(other), layers.times(present), strict=True)]
        links = [a / max(b, 1) for a, b in zip(layers.crossing(other), layers.crossing(present), strict=True)]

        def change(action: Action, seconds: float) -> float:
            if action.kind not in TRANSFERS:
                return seconds * stages[action.stage]
            upper = action.kind in (Kind.SEND_F, Kind.RECV_B)
            return seconds * links[action.stage if upper else action.stage - 1]

        return self.time(change=change)

    def _seconds(self, action: Action) -> float:
        """Returns the duration of an action, which another schedule may split otherwise."""
        found = self.seconds.get(action)
        if found is not None or action.kind in TRANSFERS:
            return found or 0.0
        stage, m = action.stage, action.microbatch
        parts = [self.seconds.get(Action(stage, kind, m), 0.0) for kind in (Kind.B, Kind.I, Kind.W)]
        weights = sum(parts) * self._share_of_weights
        return {Kind.B: sum(parts), Kind.I: sum(parts) - weights, Kind.W: weights}.get(action.kind, 0.0)

    @cached_property
    def _share_of_weights(self) -> float:
        """The share of weight gradients in the backwards that are split."""
        inputs, weights = (
            sum(s for action, s in self.seconds.items() if action.kind is kind) for kind in (Kind.I, Kind.W)
        )
        return weights / (inputs + weights) if inputs + weights else 0.5

    def of_a_microbatch(self, kind: Kind, stage: int) -> float:
        """Returns the median duration of an action of a stage; 0 if it has none."""
        own = [s for action, s in self.seconds.items() if action.kind is kind and action.stage == stage]
        return median(own) if own else 0.0


def _sums(own: Sequence[PythonTime], value: Callable[[PythonTime], float]) -> dict[Action, float]:
    found: dict[Action, float] = defaultdict(float)
    for each in own:
        found[each.action] += max(0.0, value(each))
    return found


def _shortest(rounds: Sequence[Mapping[Action, float]]) -> dict[Action, float]:
    return {action: min(own.get(action, 0.0) for own in rounds) for action in (rounds[0] if rounds else ())}


class LayerCosts(NamedTuple):
    """The costs of each layer for one micro-batch.

    Attributes:
        seconds: its forward and backward.
        boundary_bytes: what crosses to the next stage if it is the last of its stage.
    """

    seconds: Sequence[float]
    boundary_bytes: Sequence[int]

    def times(self, balance: Sequence[int]) -> list[float]:
        """Returns the seconds of each stage."""
        ends = list(accumulate(balance))
        return [sum(self.seconds[end - size : end]) for size, end in zip(balance, ends, strict=True)]

    def crossing(self, balance: Sequence[int]) -> list[int]:
        """Returns the bytes that cross behind each stage but the last."""
        return [self.boundary_bytes[end - 1] for end in list(accumulate(balance))[:-1]]


def best_balance(costs: Costs, layers: LayerCosts, present: Sequence[int]) -> list[int]:
    """Returns the fastest balance that is found.

    The recorded time of a layer moves with it. The search starts at the present balance and at that of equal
    times, and makes one stage a layer shorter and another a layer longer while that makes the step faster.
    """
    tried: dict[tuple[int, ...], float] = {}
    layers = costs.as_recorded(layers, present)

    def seconds(balance: Sequence[int]) -> float:
        key = tuple(balance)
        if key not in tried:
            tried[key] = costs.with_balance(layers, present, key)
        return tried[key]

    for start in (list(present), balance_by_cost(len(present), layers.seconds)):
        best: Sequence[int] | None = start
        while best is not None and len(tried) < _MAX_BALANCES:
            now = seconds(best)
            best = min(_neighbours(best), key=seconds, default=None)
            if best is not None and seconds(best) >= now:
                best = None
    found = min(tried, key=tried.__getitem__)
    return list(found)


def _neighbours(balance: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the balances where one stage has a layer less, and another stage a layer more."""
    found = []
    for i, j in permutations(range(len(balance)), 2):
        if balance[i] > 1:
            changed = list(balance)
            changed[i] -= 1
            changed[j] += 1
            found.append(tuple(changed))
    return found


# The maximum number of balances that are simulated.
_MAX_BALANCES = 200


class Alternative(NamedTuple):
    """What steps with another value of a setting took, which ran in turn with the present one.

    Attributes:
        value: the value.
        costs: their durations.
        ratios: their seconds, relative to those of steps with the present value, in each turn.
        is_expected: whether it should gain, though other programs may hide that.
    """

    value: int
    costs: Costs
    ratios: Sequence[float]
    is_expected: bool = False


class Measurements(NamedTuple):
    """What is measured if advice asks for it; each returns None if there is nothing to measure.

    Attributes:
        chunks: steps with a number of micro-batches.
        threads: steps with another number of intra-op threads.
        layers: the costs of the layers, measured independently once or several times, and the balance.
    """

    chunks: Callable[[int], Alternative | None] = lambda _: None
    threads: Callable[[], Alternative | None] = lambda: None
    layers: Callable[[], tuple[Sequence[LayerCosts], Sequence[int]] | None] = lambda: None


class Found(NamedTuple):
    """Advice, and what was not advised.

    Attributes:
        advice: the changes that gain most, the best first.
        withheld: changes of which the measurements do not say whether, or how much, they gain.
    """

    advice: list[Advice]
    withheld: list[str]


@dataclass
class _Offers:
    """What changes would gain, as measurements and halves of them predict.

    Attributes:
        step: the seconds of a step.
        shortest: those of a step that little has disturbed.
        costs: the durations of its actions.
        layers_stay: whether another balance needs a new pipeline.
        found: what is advised.
        withheld: what might gain.
    """

    step: float
    shortest: float
    costs: Costs
    layers_stay: bool
    found: list[Advice] = field(default_factory=list)
    withheld: list[str] = field(default_factory=list)

    @cached_property
    def base(self) -> float:
        """The simulated time of the present step."""
        return self.costs.time()

    @cached_property
    def halves(self) -> Sequence[Costs]:
        """The durations in each half of the steps."""
        return self.costs.halves()

    def offer(
        self,
        what: str,
        settings: dict[str, Any],
        ratio: float,
        others: Sequence[float],
        simulated: bool = True,
    ) -> None:
        """Advises a change if a step takes clearly less than it does, by all ratios of its time."""
        least, most = min(ratio, *others), max(ratio, *others)
        is_known = most - least <= min(_MAX_ERROR * ratio, (1 - ratio) / 2)
        if simulated:
            is_known &= self.shortest <= (1 + _MAX_ERROR) * self.base
        if is_known and most < 1 - LEAST_GAIN:
            of_a_new = self.layers_stay and "balance" in settings
            self.found.append(Advice(what, settings, self.step * ratio, of_a_new=of_a_new))
        elif least < 1 - 2 * LEAST_GAIN:
            self.withheld.append(" ".join([what, *(f"(model.{name})" for name in settings)]))

    def simulate(self, what: str, settings: dict[str, Any], change: Callable[[Costs], float]) -> None:
        """Offers a change, given the time of a step with it."""
        others = [change(own) / own.time() for own in self.halves]
        self.offer(what, settings, change(self.costs) / self.base, others)

    def balance(self, each: Sequence[LayerCosts], present: Sequence[int]) -> None:
        """Offers the best balance by the costs of the layers."""
        seconds = [min(own) for own in zip(*(layers.seconds for layers in each), strict=True)]
        layers = LayerCosts(seconds, each[0].boundary_bytes)
        balance = best_balance(self.costs, layers, present)
        if balance == list(present):
            return
        crossing, before = (sum(layers.crossing(own)) for own in (balance, present))
        what = "another balance" + ", where less crosses between stages" * (crossing < before)

        def moved(own: Costs, layers: LayerCosts) -> float:
            recorded = own.as_recorded(layers, present)
            return own.with_balance(recorded, present, balance) / own.time()

        others = [moved(own, layers) for own, layers in product(self.halves, each)]
        self.offer(what, {"balance": balance}, moved(self.costs, layers), others)

    def chunks(self, trial: Alternative, batch_norm: bool) -> None:
        """Offers another number of micro-batches, with which steps ran."""
        if _is_explained(self.costs, trial):
            fewer = trial.value < self.costs.num_microbatches
            what = "fewer micro-batches, which take more memory" if fewer else "more micro-batches"
            what += f"; {SMALLER_BATCHES}" if batch_norm else ""
            self.offer(what, {"chunks": trial.value}, median(trial.ratios), trial.ratios, simulated=False)
        elif min(trial.ratios) < 1 - 2 * LEAST_GAIN:
            self.withheld.append("another number of micro-batches (model.chunks)")

    def threads(self, trial: Alternative) -> None:
        """Offers another number of threads; if it hides what others gain, withholds these."""
        what, settings = "another number of intra-op threads", {"threads_per_stage": trial.value}
        self.offer(what, settings, median(trial.ratios), trial.ratios, simulated=False)
        if trial.is_expected and not any(advice.settings == settings for advice in self.found):
            self.withheld.append("fewer intra-op threads (model.threads_per_stage)")
            self.withheld += [advice.what for advice in self.found]
            self.found = []


def improvements(
    step: float,
    shortest: float,
    costs: Costs,
    *,
    schedule: ScheduleChoice | None,
    checkpoint: CheckpointSetting,
    measured: Measurements,
    batch_norm: bool = False,
    layers_stay: bool = False,
) -> Found:
    """Returns the changes that gain most.

    Each prediction is made with all measurements, and with each half of them. A change is advised if it gains
    in all of these, by clearly more than they differ; and a simulated one, if the present steps take about
    the time that is simulated for them, too.

    Args:
        step: the seconds of a step.
        shortest: those of a step that little has disturbed.
        costs: the durations of its actions.
        schedule: the schedule of steps in one call; None if forward and backward are two calls.
        checkpoint: the checkpoint mode.
        measured: what is measured besides.
        batch_norm: whether micro-batches are normalised by their own statistics.
        layers_stay: whether another balance needs a new pipeline.
    """
    offers = _Offers(step, shortest, costs, layers_stay)
    if any(action.kind is Kind.R for action in costs.seconds):
        what = "keep all activations, if memory suffices"
        offers.simulate(what, {"checkpoint": "never"}, Costs.without_recompute)
    has_choice = schedule is not None and costs.has_backward and costs.num_stages > 1
    size, ranks = (costs.num_stages, costs.num_microbatches), len(costs.phases[0].ranks)
    recomputed = checkpoint_policy(checkpoint, size[0], training=True).recomputed(size[1])
    for name in [each for each in _SCHEDULES if has_choice and each != schedule]:
        phases = [schedule_for(name, *size, num_devices=ranks, recomputed=recomputed)]
        offers.simulate("another schedule", {"schedule": name}, functools.partial(Costs.time, phases=phases))
    layers = measured.layers()
    if layers is not None and costs.num_stages > 1:
        offers.balance(*layers)
    if costs.python_layers:
        names = ", ".join(name for _, name in sorted(costs.python_layers.items()))
        offers.simulate(f"{names}: let C++ run what runs in Python", {}, Costs.without_python)
    threads, chunks = measured.threads(), None
    if schedule is None or isinstance(schedule, str):
        chunks = _fastest(measured.chunks, costs.num_microbatches)
    if chunks is not None:
        offers.chunks(chunks, batch_norm)
    if threads is not None:  # last: threads that wait for each other disturb all measurements
        offers.threads(threads)
    best = sorted(offers.found, key=lambda advice: advice.predicted)
    return Found(best[:_MAX_ADVICE], offers.withheld)


def _fastest(tried: Callable[[int], Alternative | None], present: int) -> Alternative | None:
    """Returns the fastest number of micro-batches, or None; it is doubled, or halved, while that gains."""
    for factor in (2.0, 0.5):
        best, number = None, present
        while (trial := tried(int(number * factor))) is not None:
            if median(trial.ratios) >= (1.0 if best is None else median(best.ratios)):
                break
            best, number = trial, trial.value
        if best is not None:
            return best
    return None


def _is_explained(costs: Costs, trial: Alternative) -> bool:
    """Whether each stage took clearly longer for one of the larger micro-batches, by each half of steps."""
    small, large = sorted((costs, trial.costs), key=lambda each: -each.num_microbatches)
    return all(
        min(own.of_all_kinds(stage) for own in large.halves())
        > max(own.of_all_kinds(stage) for own in small.halves())
        for stage in range(costs.num_stages)
    )
