"""Advice: which change of a setting would make a recorded step faster, by simulations with its durations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, permutations
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

from gpipe_fast.balance.partition import balance_by_cost
from gpipe_fast.layers.batchnorm import SMALLER_BATCHES
from gpipe_fast.lower.checkpoint import CheckpointSetting, checkpoint_policy
from gpipe_fast.reports.events import Event
from gpipe_fast.schedule import (
    TRANSFERS,
    Action,
    Kind,
    Schedule,
    ScheduleChoice,
    fill_drain,
    schedule_for,
)

# Changes that are predicted to gain a smaller share of the step are left out.
LEAST_GAIN = 0.03
_MAX_ADVICE = 3
# A number of micro-batches further from the recorded one, by this factor, is not predicted.
_FURTHEST = 4
_COMPUTATIONS = (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W)
# The schedules that are tried; 'interleaved' needs another balance.
_SCHEDULES = ("gpipe", "1f1b", "zb-h1")


@dataclass(frozen=True)
class Advice:
    """A change that would make a step faster.

    Attributes:
        what: what changes, in words.
        settings: the new values of attributes of the model; empty if the change is one of its layers.
        predicted: the predicted seconds of a step.
        measured: the measured seconds of a step; None if it was not measured.
    """

    what: str
    settings: dict[str, Any]
    predicted: float
    measured: float | None = None

    @property
    def code(self) -> str:
        """The change as a line of Python; empty if it is one of a layer."""
        return as_code(self.settings)


def as_code(settings: Mapping[str, Any]) -> str:
    """Returns settings of a model as a line of Python."""
    return "; ".join(f"model.{name} = {value!r}" for name, value in sorted(settings.items()))


@dataclass(frozen=True)
class Costs:
    """The durations of a step's actions.

    Attributes:
        phases: the schedule of each engine run.
        seconds: the duration of each action.
        transit: the seconds from the end of each SEND until the tensor has arrived; by default 0.
        python_stages: the stages with layers that run in Python.
        rounds: the durations in each recorded step, of which `seconds` are the medians.
    """

    phases: Sequence[Schedule]
    seconds: Mapping[Action, float]
    transit: Mapping[Action, float] = field(default_factory=dict)
    python_stages: Collection[int] = ()
    rounds: Sequence[Mapping[Action, float]] = ()

    @classmethod
    def of(
        cls,
        phases: Sequence[Schedule],
        recorded: Sequence[Mapping[Action, Event]],
        python_stages: Collection[int] = (),
    ) -> Costs:
        """Makes the costs of steps with the same schedule: medians over the steps.

        Args:
            phases: the schedule of each engine run.
            recorded: the events of each step.
            python_stages: the stages with layers that run in Python.
        """
        rounds = [{a: event.end - event.begin for a, event in each.items()} for each in recorded]
        seconds = {a: median(own[a] for own in rounds) for a in rounds[0]}
        transit = {a: median(each[a].transit for each in recorded) for a in recorded[0]}
        return cls(phases, seconds, {a: s for a, s in transit.items() if s > 0}, python_stages, rounds)

    def each_round(self) -> list[Costs]:
        """Returns the costs of each recorded step; these alone if their rounds are unknown."""
        return [replace(self, seconds=own, rounds=()) for own in self.rounds] or [self]

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

        own = self.phases if phases is None else phases
        return sum(max(phase.times(seconds, transit).values()) for phase in own)

    def without_recompute(self) -> float:
        """Returns the simulated seconds of a step whose recomputes take no time."""

        def change(action: Action, seconds: float) -> float:
            return 0.0 if action.kind is Kind.R else max(0.0, seconds - self._hidden_recompute(action))

        return self.time(change=change)

    def _hidden_recompute(self, action: Action) -> float:
        """Returns the seconds of the recompute in a backward of Python layers, whose R takes no time.

        They are taken to be those of the forward.
        """
        if action.stage not in self.python_stages:
            return 0.0
        recompute = Action(action.stage, Kind.R, action.microbatch)
        if action.kind not in (Kind.B, Kind.I) or recompute not in self.seconds:
            return 0.0
        forward = self.seconds.get(Action(action.stage, Kind.F, action.microbatch), 0.0)
        return forward if self.seconds[recompute] < 0.1 * forward else 0.0

    def in_python(self, layers: LayerCosts, present: Sequence[int]) -> dict[Action, float]:
        """Returns the seconds of each action that layers in Python take beyond their operators.

        That is what is recorded beyond the layers' own times. These are measured one by one, so they are
        multiplied by what stages without Python take longer in the step.
        """
        ends = list(accumulate(present))
        stages = [range(end - size, end) for size, end in zip(present, ends, strict=True)]
        slower = [
            (self.of_all_kinds(stage) - self.of_a_microbatch(Kind.R, stage))
            / sum(layers.seconds[i] for i in own)
            for stage, own in enumerate(stages)
            if stage not in self.python_stages and sum(layers.seconds[i] for i in own) > 0
        ]
        factor = max(1.0, min(slower, default=1.0))
        found: dict[Action, float] = {}
        for action, seconds in self.seconds.items():
            if action.kind in TRANSFERS or not any(i in layers.operators for i in stages[action.stage]):
                continue
            own = stages[action.stage]
            forward = sum(layers.operators.get(i, layers.forward[i]) for i in own)
            backward = sum(layers.seconds[i] - layers.forward[i] for i in own)
            again = self._hidden_recompute(action) > 0
            needed = forward if action.kind in (Kind.F, Kind.R) else backward + again * forward
            found[action] = max(0.0, seconds - factor * needed)
        return found

    def without_python(self, python: Mapping[Action, float], stage: int | None = None) -> float:
        """Returns the simulated seconds of a step whose layers spend no time in the interpreter.

        Args:
            python: what `in_python` returns.
            stage: the stage without this time; None for all.
        """

        def change(action: Action, seconds: float) -> float:
            return seconds - python.get(action, 0.0) if stage in (None, action.stage) else seconds

        return self.time(change=change)

    def as_recorded(self, layers: LayerCosts, present: Sequence[int]) -> LayerCosts:
        """Returns the costs of layers with the seconds of each in the step: its share of what its stage took.

        Layers in Python get what their stage takes beyond its other layers, as measured one by one.
        """
        found: list[float] = []
        for stage, (size, end) in enumerate(zip(present, accumulate(present), strict=True)):
            own = range(end - size, end)
            seconds = {i: max(1e-12, layers.seconds[i]) for i in own}
            python = [i for i in own if i in layers.operators]
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

    def of_a_transfer(self, kind: Kind, stage: int) -> float:
        """Returns the median seconds in which a tensor that a stage sends arrives; 0 on the CPU."""
        own = [s for send, s in self.transit.items() if send.kind is kind and send.stage == stage]
        return median(own) if own else 0.0

    def of_a_microbatch(self, kind: Kind, stage: int) -> float:
        """Returns the median duration of an action of a stage, in the fastest round; 0 if it has none.

        What else runs on the machine makes actions longer, never shorter.
        """
        rounds = self.rounds or [self.seconds]
        own = [[s for a, s in each.items() if a.kind is kind and a.stage == stage] for each in rounds]
        return min(map(median, own)) if own[0] else 0.0


class LayerCosts(NamedTuple):
    """The costs of each layer for one micro-batch.

    Attributes:
        seconds: its forward and backward.
        boundary_bytes: what crosses to the next stage if it is the last of its stage.
        forward: its forward alone.
        operators: for each layer that runs in Python, the part of its forward in which operators run.
        names: what these layers are called.
    """

    seconds: Sequence[float]
    boundary_bytes: Sequence[int]
    forward: Sequence[float] = ()
    operators: Mapping[int, float] = MappingProxyType({})
    names: Mapping[int, str] = MappingProxyType({})

    def times(self, balance: Sequence[int]) -> list[float]:
        """Returns the seconds of each stage."""
        ends = list(accumulate(balance))
        return [sum(self.seconds[end - size : end]) for size, end in zip(balance, ends, strict=True)]

    def crossing(self, balance: Sequence[int]) -> list[int]:
        """Returns the bytes that cross behind each stage but the last."""
        return [self.boundary_bytes[end - 1] for end in list(accumulate(balance))[:-1]]


def best_balance(costs: Costs, layers: LayerCosts, present: Sequence[int]) -> tuple[list[int], float]:
    """Returns the fastest balance that is found, and the simulated seconds of a step with it.

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
    return list(found), tried[found]


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


class Measurements(NamedTuple):
    """What is measured if advice asks for it; each returns None if there is nothing to measure.

    Attributes:
        chunks: the durations with another number of micro-batches.
        threads: another number of intra-op threads, and the durations with it.
        layers: the costs of the layers, and the present balance.
    """

    chunks: Callable[[], Costs | None] = lambda: None
    threads: Callable[[], tuple[int, Costs] | None] = lambda: None
    layers: Callable[[], tuple[LayerCosts, Sequence[int]] | None] = lambda: None


def improvements(
    steps: Sequence[float],
    costs: Costs,
    *,
    batch_size: int,
    schedule: ScheduleChoice | None,
    checkpoint: CheckpointSetting,
    measured: Measurements,
    batch_norm: bool = False,
) -> list[Advice]:
    """Returns the changes that gain most, the best first.

    A change gains if it does with the durations of each recorded step but one. What other steps have measured
    gains if it does by more than the recorded ones differ.

    Args:
        steps: the measured seconds of each recorded step.
        costs: their durations.
        batch_size: the number of samples.
        schedule: the schedule of steps in one call; None if forward and backward are two calls.
        checkpoint: the checkpoint mode.
        measured: what is measured besides.
        batch_norm: whether micro-batches are normalised by their own statistics.
    """
    step, base, rounds = median(steps), costs.time(), costs.each_round()
    middle = sorted(steps)[1:-1] if len(steps) > 3 else steps
    spread = max(LEAST_GAIN, 1 - min(middle) / max(middle))
    found: list[Advice] = []

    def add(what: str, settings: dict[str, Any], change: Callable[[Costs], float]) -> None:
        shares = sorted(change(own) / own.time() for own in rounds)
        if all(share < 1 - LEAST_GAIN for share in shares[: max(1, len(shares) - 1)]):
            add_measured(what, settings, change(costs), LEAST_GAIN)

    def add_measured(what: str, settings: dict[str, Any], seconds: float, least: float = spread) -> None:
        if seconds < (1 - least) * base:
            found.append(Advice(what, settings, step * seconds / base))

    if any(action.kind is Kind.R for action in costs.seconds):
        add("keep all activations, if memory suffices", {"checkpoint": "never"}, Costs.without_recompute)
    has_choice = schedule is not None and costs.has_backward and costs.num_stages > 1
    for name in [each for each in _SCHEDULES if has_choice and each != schedule]:
        phases = phases_for(name, costs, costs.num_microbatches, checkpoint, is_step=True)
        add("another schedule", {"schedule": name}, functools.partial(Costs.time, phases=phases))
    layers = measured.layers()
    if layers is not None and costs.num_stages > 1:
        balance, _ = best_balance(costs, *layers)
        if balance != list(layers[1]):
            crossing, before = (sum(layers[0].crossing(each)) for each in (balance, layers[1]))
            what = "another balance" + ", where less crosses between stages" * (crossing < before)

            def moved(own: Costs) -> float:
                return own.with_balance(own.as_recorded(*layers), layers[1], balance)

            add(what, {"balance": balance}, moved)
    if layers is not None and layers[0].operators:
        names = ", ".join(name for _, name in sorted(layers[0].names.items()))
        what = f"{names}: let C++ run what runs in Python"
        add(what, {}, lambda own: own.without_python(own.in_python(*layers)))
    threads = measured.threads()
    if threads is not None:
        what = "another number of intra-op threads"
        add_measured(what, {"threads_per_stage": threads[0]}, threads[1].time())
    if schedule is None or isinstance(schedule, str):
        other = measured.chunks()
        best = None if other is None else _best_chunks(costs, other, batch_size, schedule, checkpoint)
        if best is not None:
            fewer = best[0] < costs.num_microbatches
            what = "fewer micro-batches, which take more memory" if fewer else "more micro-batches"
            what += f"; {SMALLER_BATCHES}" if batch_norm else ""
            add_measured(what, {"chunks": best[0]}, best[1])
    return sorted(found, key=lambda advice: advice.predicted)[:_MAX_ADVICE]


def _best_chunks(
    costs: Costs, other: Costs, batch_size: int, schedule: str | None, checkpoint: CheckpointSetting
) -> tuple[int, float] | None:
    """Returns the fastest number of micro-batches, and the simulated seconds with it.

    The duration of an action is taken as a constant plus a part for each sample, from two measurements. None
    if a stage did not clearly take longer for the larger micro-batches: then its part is unknown.
    """
    sizes = [-(-batch_size // each.num_microbatches) for each in (costs, other)]
    small, large = sorted((costs, other), key=lambda each: -each.num_microbatches)
    if sizes[0] == sizes[1] or not all(
        _clearly_more(large, small, stage) for stage in range(costs.num_stages)
    ):
        return None
    fits = {}
    for stage in range(costs.num_stages):
        for kind in _COMPUTATIONS:
            here, there = costs.of_a_microbatch(kind, stage), other.of_a_microbatch(kind, stage)
            slope = max(0.0, (here - there) / (sizes[0] - sizes[1]))
            fits[stage, kind] = max(0.0, here - slope * sizes[0]), slope
    tried = {}
    number = 1
    while number <= batch_size:
        size = -(-batch_size // number)
        count = -(-batch_size // size)
        if 1 / _FURTHEST <= count / costs.num_microbatches <= _FURTHEST:
            tried[count] = size
        number *= 2
    times = {}
    for count, size in tried.items():
        last = batch_size - size * (count - 1)
        lengths = {m: last if m == count - 1 else size for m in range(count)}
        seconds = {
            Action(stage, kind, m): fits[stage, kind][0] + fits[stage, kind][1] * lengths[m]
            for stage in range(costs.num_stages)
            for kind in _COMPUTATIONS
            for m in range(count)
            if sum(fits[stage, kind])
        }
        transit = {  # in proportion to the size
            Action(stage, kind, m): costs.of_a_transfer(kind, stage) * lengths[m] / sizes[0]
            for stage in range(costs.num_stages)
            for kind in (Kind.SEND_F, Kind.SEND_B)
            for m in range(count)
        }
        model = Costs(costs.phases, seconds, transit)
        times[count] = model.time(
            phases_for(schedule or "gpipe", costs, count, checkpoint, schedule is not None)
        )
    best = min(times, key=times.__getitem__, default=costs.num_microbatches)
    present = costs.num_microbatches
    if best == present:
        return None
    # Relative to what the same model predicts for the present number, if it was tried.
    factor = costs.time() / times[present] if present in times else 1.0
    return best, times[best] * factor


def _clearly_more(large: Costs, small: Costs, stage: int) -> bool:
    """Whether a stage takes longer for one large micro-batch than for a small one, but for outliers."""
    more, less = (sorted(own.of_all_kinds(stage) for own in each.each_round()) for each in (large, small))
    return more[len(more) // 4] > less[-1 - len(less) // 4]


def phases_for(
    schedule: str, costs: Costs, num_microbatches: int, checkpoint: CheckpointSetting, is_step: bool
) -> list[Schedule]:
    """Returns the schedules of the engine's runs for another number of micro-batches or another schedule."""
    num_stages = costs.num_stages
    recomputed = checkpoint_policy(checkpoint, num_stages, training=True).recomputed(num_microbatches)
    if not costs.has_backward:
        return [fill_drain(num_stages, num_microbatches, backward=False)]
    if is_step:
        ranks = len(costs.phases[0].ranks)
        return [
            schedule_for(schedule, num_stages, num_microbatches, num_devices=ranks, recomputed=recomputed)
        ]
    whole = fill_drain(num_stages, num_microbatches, recomputed=recomputed)
    return [whole.forward_part(), whole.backward_part()]
