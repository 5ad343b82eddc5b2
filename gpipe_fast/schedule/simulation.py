"""Simulations: when the actions of a schedule begin and end, from the time that each of them takes.

The rules are those of `Schedule`: a rank runs its actions one after another, a RECV waits for its SEND, and a
SEND waits for a free slot. No PyTorch and no device is needed::

    print(simulate("1f1b", 4, 8, forward=1.0, backward=2.0))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from gpipe_fast.schedule.actions import RECEIVES, TRANSFERS, Action, Kind, tick
from gpipe_fast.schedule.memory import peaks
from gpipe_fast.schedule.schedule import Schedule
from gpipe_fast.schedule.schedules import ScheduleChoice, bubble, schedule_for

# The value of a stage, or one value for each stage.
PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Simulation:
    """The times of a schedule's actions. ``print`` shows a summary.

    Attributes:
        schedule: the schedule.
        begins: the time at which each action begins.
        ends: the time at which each action ends.
        peak_bytes: for each stage, the maximum of the activations that it keeps; empty if not asked for.
    """

    schedule: Schedule
    begins: dict[Action, float]
    ends: dict[Action, float]
    peak_bytes: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        seconds: Callable[[Action], float] = tick,
        transit: Callable[[Action], float] | None = None,
    ) -> Simulation:
        """Simulates a schedule; arguments as of `Schedule.times`."""
        ends = schedule.times(seconds) if transit is None else schedule.times(seconds, transit)
        return cls(schedule, {action: end - seconds(action) for action, end in ends.items()}, ends)

    @cached_property
    def time(self) -> float:
        """The time of the step: from 0 to the end of the last action."""
        return max(self.ends.values())

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank, the time in which it computes."""
        return tuple(
            sum(self.ends[a] - self.begins[a] for a in actions if a.kind not in TRANSFERS)
            for actions in self.schedule.ranks
        )

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they do not compute."""
        return 1 - sum(self.busy) / (len(self.busy) * self.time) if self.time else 0.0

    @cached_property
    def critical_path(self) -> tuple[Action, ...]:
        """The actions that determine the time of the step: each begins when the one before it lets it."""
        waits = self.schedule.waits()
        before = {b: a for actions in self.schedule.ranks for a, b in pairwise(actions)}
        action: Action | None = max(self.ends, key=self.ends.__getitem__)
        path: list[Action] = []
        while action is not None:
            path.append(action)
            own, awaited = before.get(action), waits.get(action)
            # Otherwise the tensor may have been in transit.
            is_own = own is not None and self.ends[own] >= self.begins[action] - 1e-9 * self.time
            action = own if is_own or awaited is None else awaited
        return tuple(reversed(path))

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """For each stage, the maximum number of micro-batches between their forward and their backward."""
        kept = [[(1, 0)] * self.schedule.num_microbatches] * self.schedule.num_stages
        return tuple(map(int, peaks(self.schedule, kept)))

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as numbers, strings, lists and dicts, for JSON."""
        names = [str(action) for action in self.critical_path]
        return {
            "stages": self.schedule.num_stages,
            "microbatches": self.schedule.num_microbatches,
            "time": self.time,
            "bubble": self.bubble,
            "busy": list(self.busy),
            "kept": list(self.kept),
            "peak_bytes": list(self.peak_bytes),
            "critical_path": names,
            "actions": [
                {"action": str(action), "begin": self.begins[action], "end": end}
                for action, end in self.ends.items()
            ],
        }

    def __str__(self) -> str:
        """Returns a line about the step, one about the formula of the paper, and a row for each rank."""
        schedule = self.schedule
        formula = bubble(schedule.num_stages, schedule.num_microbatches)
        name = "stage" if schedule.ranks == schedule.stages else "rank"
        lines = [
            f"{schedule.num_stages} stages, {schedule.num_microbatches} micro-batches: time {self.time:.6g}, "
            f"bubble {self.bubble:.1%}",
            f"(K-1)/(M+K-1) = {formula:.1%} holds for equal stages whose backwards are neither split nor "
            "recomputed: weights=0, checkpoint='never'",
        ]
        for rank, busy in enumerate(self.busy):
            stages = [stage for stage, own in schedule.rank_of.items() if own == rank]
            kept = ", ".join(str(self.kept[stage]) for stage in stages)
            share = busy / self.time if self.time else 0.0
            line = f"{name} {rank}: busy {share:.1%}, keeps {kept} micro-batches"
            if self.peak_bytes:
                line += f", at most {max(self.peak_bytes[stage] for stage in stages):,.0f} bytes"
            lines.append(line)
        return "\n".join(lines)


def simulate(
    schedule: ScheduleChoice = "gpipe",
    num_stages: int = 1,
    num_microbatches: int = 1,
    *,
    forward: PerStage = 1.0,
    backward: PerStage = 2.0,
    weights: PerStage | None = None,
    recompute: PerStage | None = None,
    checkpoint: str = "except_last",
    transfer: PerStage = 0.0,
    latency: float = 0.0,
    bandwidth: float = float("inf"),
    boundary_bytes: PerStage = 0.0,
    activation_bytes: PerStage = 0.0,
    num_devices: int = 1,
) -> Simulation:
    """Simulates a step from the times of its stages. Plain Python; it runs nothing.

    Args:
        schedule: As for `GPipe`: a name, a `Schedule`, or a function that returns one.
        num_stages: K.
        num_microbatches: M.
        forward: The time of a stage's forward of one micro-batch, in any unit; for all stages, or for each.
        backward: The time of its backward without recompute: gradients of inputs and of weights.
        weights: The part of ``backward`` that weight gradients take, which run after the gradients of inputs
            are sent. By default half.
        recompute: The time of its recompute; by default that of its forward.
        checkpoint: Which micro-batches are recomputed: ``'always'``, ``'except_last'`` or ``'never'``.
        transfer: The time that a SEND takes its stage.
        latency: The time from a SEND until the tensor begins to arrive, in which both stages go on.
        bandwidth: Bytes per unit of time of a connection; adds ``boundary_bytes / bandwidth`` to the latency.
        boundary_bytes: The bytes that enter a stage for one micro-batch, which it keeps for a recompute.
        activation_bytes: The bytes that a stage's forward of one micro-batch keeps if it is not recomputed.
        num_devices: The number of ranks of ``'interleaved'``, if over 1.

    Returns:
        The simulation: ``time``, ``bubble``, ``critical_path``, ``kept`` and so on.

    Raises:
        TypeError: ``schedule`` is none, as for `GPipe`.
        ValueError: A time is negative, ``bandwidth`` is not positive, there is not one value for each stage,
            or ``schedule`` or ``checkpoint`` is unknown.
    """
    own = {
        "forward": forward,
        "backward": backward,
        "recompute": forward if recompute is None else recompute,
        "transfer": transfer,
        "boundary_bytes": boundary_bytes,
        "activation_bytes": activation_bytes,
    }
    each = {name: _per_stage(name, value, num_stages) for name, value in own.items()}
    halves = [value / 2 for value in each["backward"]]
    each["weights"] = halves if weights is None else _per_stage("weights", weights, num_stages)
    if any(w > b for w, b in zip(each["weights"], each["backward"], strict=True)):
        raise ValueError(
            f"weights is a part of backward, got weights={weights} and backward={backward}; pass the sum of "
            "both parts as backward"
        )
    if not 0 <= latency < float("inf") or not bandwidth > 0:
        raise ValueError(f"latency must be at least 0 and bandwidth positive, got {latency} and {bandwidth}")
    if num_devices < 1:
        raise ValueError(f"num_devices must be at least 1, got {num_devices}")
    recomputed = recomputed_by(checkpoint, num_microbatches)
    made = schedule_for(
        schedule, num_stages, num_microbatches, num_devices=num_devices, recomputed=recomputed
    )

    inputs = [b - w for b, w in zip(each["backward"], each["weights"], strict=True)]
    costs = {kind: each[name] for kind, name in _COSTS.items()} | {Kind.I: inputs}
    costs |= dict.fromkeys(RECEIVES, [0.0] * num_stages)
    boundary_bytes = each["boundary_bytes"]

    def seconds(action: Action) -> float:
        return costs[action.kind][action.stage]

    def transit(send: Action) -> float:
        entered = send.stage + 1 if send.kind is Kind.SEND_F else send.stage
        return latency + boundary_bytes[entered] / bandwidth

    pairs = list(zip(each["boundary_bytes"], each["activation_bytes"], strict=True))
    kept = [[(a, b) if m in recomputed else (a + b, 0.0) for m in range(num_microbatches)] for a, b in pairs]
    found = Simulation.of(made, seconds, transit)
    peak_bytes = peaks(made, kept) if any(map(any, pairs)) else ()
    return replace(found, peak_bytes=tuple(peak_bytes))


_COSTS = {
    Kind.F: "forward",
    Kind.R: "recompute",
    Kind.B: "backward",
    Kind.W: "weights",
    Kind.SEND_F: "transfer",
    Kind.SEND_B: "transfer",
}


def _per_stage(name: str, value: PerStage, num_stages: int) -> list[float]:
    found = [float(value)] * num_stages if isinstance(value, (int, float)) else [float(x) for x in value]
    if len(found) != num_stages:
        raise ValueError(
            f"{name} has {len(found)} values for {num_stages} stages; pass one number, or one each"
        )
    if not all(0 <= x < float("inf") for x in found):
        raise ValueError(f"{name} must be finite and at least 0, got {value}")
    return found


def recomputed_by(checkpoint: str, num_microbatches: int) -> range:
    """Returns the micro-batches that a checkpoint mode recomputes.

    Raises:
        ValueError: the mode is unknown.
    """
    counts = {"always": num_microbatches, "except_last": num_microbatches - 1, "never": 0}
    if checkpoint not in counts:
        raise ValueError(f"checkpoint must be one of {list(counts)}, got {checkpoint!r}")
    return range(counts[checkpoint])
