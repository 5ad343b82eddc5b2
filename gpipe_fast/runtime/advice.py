"""Advice: which change of a setting would make a recorded step faster, by simulations with its durations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from gpipe_fast.schedule import TRANSFERS, Action, Kind, Schedule, ScheduleChoice, fill_drain, schedule_for

# Changes that are predicted to gain a smaller share of the step are left out.
_LEAST_GAIN = 0.03
_MAX_ADVICE = 3
# The schedules that are tried; 'interleaved' needs another balance.
_SCHEDULES = ("gpipe", "1f1b", "zb-h1")


@dataclass(frozen=True)
class Advice:
    """A change of settings.

    Attributes:
        what: what changes, in words.
        settings: the new values of attributes of the model.
        predicted: the predicted seconds of a step.
        measured: the measured seconds of a step; None if it was not measured.
    """

    what: str
    settings: dict[str, Any]
    predicted: float
    measured: float | None = None

    @property
    def code(self) -> str:
        """The change as a line of Python."""
        return "; ".join(f"model.{name} = {value!r}" for name, value in self.settings.items())


@dataclass(frozen=True)
class Costs:
    """The durations of a step's actions.

    Attributes:
        phases: the schedule of each engine run.
        seconds: the duration of each action.
    """

    phases: Sequence[Schedule]
    seconds: Mapping[Action, float]

    @classmethod
    def of(cls, phases: Sequence[Schedule], recorded: Sequence[Mapping[Action, float]]) -> Costs:
        """Makes the costs of steps with the same schedule: medians over the steps."""
        return cls(phases, {action: median(each[action] for each in recorded) for action in recorded[0]})

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

    def time(self, phases: Sequence[Schedule] | None = None, scale: Sequence[float] | None = None) -> float:
        """Returns the simulated seconds of a step.

        Args:
            phases: the schedules; by default the recorded ones.
            scale: by what the durations of each stage are multiplied.
        """

        def seconds(action: Action) -> float:
            return self._seconds(action) * (1.0 if scale is None else scale[action.stage])

        return sum(phase.critical_path(seconds) for phase in (self.phases if phases is None else phases))

    def without_recompute(self) -> float:
        """Returns the simulated seconds of a step whose recomputes take no time."""

        def seconds(action: Action) -> float:
            return 0.0 if action.kind is Kind.R else self._seconds(action)

        return sum(phase.critical_path(seconds) for phase in self.phases)

    def _seconds(self, action: Action) -> float:
        """Returns the duration of an action, which another schedule may split otherwise."""
        found = self.seconds.get(action)
        if found is not None or action.kind in TRANSFERS:
            return found or 0.0
        stage, m = action.stage, action.microbatch
        parts = [self.seconds.get(Action(stage, kind, m), 0.0) for kind in (Kind.B, Kind.I, Kind.W)]
        weights = sum(parts) * self._share_of_weights()
        return {Kind.B: sum(parts), Kind.I: sum(parts) - weights, Kind.W: weights}.get(action.kind, 0.0)

    def _share_of_weights(self) -> float:
        """Returns the share of weight gradients in the backwards that are split."""
        inputs, weights = (
            sum(s for action, s in self.seconds.items() if action.kind is kind) for kind in (Kind.I, Kind.W)
        )
        return weights / (inputs + weights) if inputs + weights else 0.5

    def of_a_microbatch(self, kind: Kind, stage: int) -> float:
        """Returns the median duration of an action of a stage; 0 if it has none."""
        own = [s for action, s in self.seconds.items() if action.kind is kind and action.stage == stage]
        return median(own) if own else 0.0


def improvements(
    step: float,
    costs: Costs,
    *,
    batch_size: int,
    schedule: ScheduleChoice | None,
    checkpoint: str,
    other: Callable[[], Costs | None],
    new_balance: Callable[[], tuple[list[int], list[float]] | None],
) -> list[Advice]:
    """Returns the changes that gain most, the best first.

    Args:
        step: the measured seconds of a step.
        costs: its durations.
        batch_size: the number of samples.
        schedule: the schedule of steps in one call; None if forward and backward are two calls.
        checkpoint: the checkpoint mode.
        other: measures the durations with another number of micro-batches; None if there is no other.
        new_balance: returns a balance by measured time, and by what it multiplies the durations of each
            stage; None if it cannot be measured, or is the present one.
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
                phases = _phases(name, costs, costs.num_microbatches, checkpoint, is_step=True)
                add("another schedule", {"schedule": name}, costs.time(phases))
    balanced = new_balance() if costs.num_stages > 1 else None
    if balanced is not None:
        add("another balance", {"balance": balanced[0]}, costs.time(scale=balanced[1]))
    if schedule is None or isinstance(schedule, str):
        measured = other()
        if measured is not None:
            best = _best_chunks(costs, measured, batch_size, schedule, checkpoint)
            if best is not None:
                fewer = best[0] < costs.num_microbatches
                what = "fewer micro-batches, which take more memory" if fewer else "more micro-batches"
                add(what, {"chunks": best[0]}, best[1])
    gaining = [advice for advice in found if advice.predicted < (1 - _LEAST_GAIN) * step]
    return sorted(gaining, key=lambda advice: advice.predicted)[:_MAX_ADVICE]


def _best_chunks(
    costs: Costs, other: Costs, batch_size: int, schedule: str | None, checkpoint: str
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
        model = Costs(costs.phases, seconds)
        times[count] = model.time(
            _phases(schedule or "gpipe", costs, count, checkpoint, schedule is not None)
        )
    best = min(times, key=times.__getitem__)
    present = costs.num_microbatches
    if best == present:
        return None
    # Relative to what the same model predicts for the present number, if it was tried.
    factor = costs.time() / times[present] if present in times else 1.0
    return best, times[best] * factor


def _phases(
    schedule: str, costs: Costs, num_microbatches: int, checkpoint: str, is_step: bool
) -> list[Schedule]:
    """Returns the schedules of the engine's runs for another number of micro-batches or another schedule."""
    counts = {"always": num_microbatches, "except_last": num_microbatches - 1, "never": 0}
    recomputed = range(counts[checkpoint])
    num_stages = costs.num_stages
    if not costs.has_backward:
        return [fill_drain(num_stages, num_microbatches, backward=False)]
    if is_step:
        ranks = len(costs.phases[0].ranks)
        return [
            schedule_for(schedule, num_stages, num_microbatches, num_devices=ranks, recomputed=recomputed)
        ]
    whole = fill_drain(num_stages, num_microbatches, recomputed=recomputed)
    return [whole.forward_part(), whole.backward_part()]
