"""Advice: which change of a setting would make a recorded step faster, by simulations with its durations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, permutations
from statistics import median
from typing import Any, NamedTuple

from gpipe_fast.balance.partition import balance_by_cost
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
    """

    phases: Sequence[Schedule]
    seconds: Mapping[Action, float]
    transit: Mapping[Action, float] = field(default_factory=dict)
    python_stages: Collection[int] = ()

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
        seconds = {a: median(each[a].end - each[a].begin for each in recorded) for a in recorded[0]}
        transit = {a: median(each[a].transit for each in recorded) for a in recorded[0]}
        return cls(phases, seconds, {a: s for a, s in transit.items() if s > 0}, python_stages)

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

    def without_python(self, python: Mapping[int, float]) -> float:
        """Returns the simulated seconds of a step whose layers spend no time in the interpreter.

        Args:
            python: for each stage with layers in Python, the seconds of one forward in the interpreter.
        """

        def change(action: Action, seconds: float) -> float:
            is_forward = action.kind in (Kind.F, Kind.R) or self._hidden_recompute(action) > 0
            return max(0.0, seconds - python.get(action.stage, 0.0)) if is_forward else seconds

        return self.time(change=change)

    def with_balance(self, layers: LayerCosts, present: Sequence[int], other: Sequence[int]) -> float:
        """Returns the simulated seconds of a step with another balance.

        Durations of stages are scaled by the sums of their layers' times, and those of transfers by the bytes
        that cross.
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
        """Returns the median duration of an action of a stage; 0 if it has none."""
        own = [s for action, s in self.seconds.items() if action.kind is kind and action.stage == stage]
        return median(own) if own else 0.0


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


def best_balance(costs: Costs, layers: LayerCosts, present: Sequence[int]) -> tuple[list[int], float]:
    """Returns the fastest balance that is found, and the simulated seconds of a step with it.

    The search starts at the present balance and at that of equal times, and makes one stage a layer shorter
    and another a layer longer while that makes the step faster.
    """
    tried: dict[tuple[int, ...], float] = {}

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
        python: the seconds of one forward in the interpreter, for each stage with layers in Python, and
            the names of these layers.
    """

    chunks: Callable[[], Costs | None] = lambda: None
    threads: Callable[[], tuple[int, Costs] | None] = lambda: None
    layers: Callable[[], tuple[LayerCosts, Sequence[int]] | None] = lambda: None
    python: Callable[[], tuple[Mapping[int, float], str] | None] = lambda: None


def improvements(
    step: float,
    costs: Costs,
    *,
    batch_size: int,
    schedule: ScheduleChoice | None,
    checkpoint: CheckpointSetting,
    measured: Measurements,
) -> list[Advice]:
    """Returns the changes that gain most, the best first.

    Args:
        step: the measured seconds of a step.
        costs: its durations.
        batch_size: the number of samples.
        schedule: the schedule of steps in one call; None if forward and backward are two calls.
        checkpoint: the checkpoint mode.
        measured: what is measured besides.
    """
    base = costs.time()
    found: list[Advice] = []

    def add(what: str, settings: dict[str, Any], seconds: float) -> None:
        found.append(Advice(what, settings, step * seconds / base))

    if any(action.kind is Kind.R for action in costs.seconds):
        add("keep all activations, if memory suffices", {"checkpoint": "never"}, costs.without_recompute())
    if schedule is not None and costs.has_backward and costs.num_stages > 1:
        for name in _SCHEDULES:
            if name != schedule:
                phases = phases_for(name, costs, costs.num_microbatches, checkpoint, is_step=True)
                add("another schedule", {"schedule": name}, costs.time(phases))
    layers = measured.layers() if costs.num_stages > 1 else None
    if layers is not None:
        balance, seconds = best_balance(costs, *layers)
        if balance != list(layers[1]):
            what = "another balance"
            if sum(layers[0].crossing(balance)) < sum(layers[0].crossing(layers[1])):
                what = "another balance, where less crosses between stages"
            add(what, {"balance": balance}, seconds)
    threads = measured.threads()
    if threads is not None:
        add("another number of intra-op threads", {"threads_per_stage": threads[0]}, threads[1].time())
    python = measured.python()
    if python is not None:
        add(f"{python[1]}: let C++ run what runs in Python", {}, costs.without_python(python[0]))
    if schedule is None or isinstance(schedule, str):
        other = measured.chunks()
        if other is not None:
            best = _best_chunks(costs, other, batch_size, schedule, checkpoint)
            if best is not None:
                fewer = best[0] < costs.num_microbatches
                what = "fewer micro-batches, which take more memory" if fewer else "more micro-batches"
                add(what, {"chunks": best[0]}, best[1])
    gaining = [advice for advice in found if advice.predicted < (1 - LEAST_GAIN) * step]
    return sorted(gaining, key=lambda advice: advice.predicted)[:_MAX_ADVICE]


def _best_chunks(
    costs: Costs, other: Costs, batch_size: int, schedule: str | None, checkpoint: CheckpointSetting
) -> tuple[int, float] | None:
    """Returns the fastest number of micro-batches, and the simulated seconds with it.

    The duration of an action is taken as a constant plus a part for each sample, from two measurements.
    """
    sizes = [-(-batch_size // each.num_microbatches) for each in (costs, other)]
    if sizes[0] == sizes[1]:
        return None
    kinds = (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W)
    fits = {}
    for stage in range(costs.num_stages):
        for kind in kinds:
            here, there = costs.of_a_microbatch(kind, stage), other.of_a_microbatch(kind, stage)
            slope = max(0.0, (here - there) / (sizes[0] - sizes[1]))
            fits[stage, kind] = max(0.0, here - slope * sizes[0]), slope
    tried = {}
    number = 1
    while number <= batch_size:
        size = -(-batch_size // number)
        count = -(-batch_size // size)
        tried[count] = size
        number *= 2
    times = {}
    for count, size in tried.items():
        last = batch_size - size * (count - 1)
        lengths = {m: last if m == count - 1 else size for m in range(count)}
        seconds = {
            Action(stage, kind, m): fits[stage, kind][0] + fits[stage, kind][1] * lengths[m]
            for stage in range(costs.num_stages)
            for kind in kinds
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
    best = min(times, key=times.__getitem__)
    present = costs.num_microbatches
    if best == present:
        return None
    # Relative to what the same model predicts for the present number, if it was tried.
    factor = costs.time() / times[present] if present in times else 1.0
    return best, times[best] * factor


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
