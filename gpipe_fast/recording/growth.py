"""The memory for activations with other numbers of micro-batches, from one recorded step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gpipe_fast.lower.checkpoint import CheckpointSetting, checkpoint_policy, has_recompute
from gpipe_fast.recording.events import Event
from gpipe_fast.recording.report import Growth, Report
from gpipe_fast.schedule import Kind, Schedule
from gpipe_fast.schedule.simulation import peaks

# The numbers of micro-batches, relative to the present one.
_FACTORS = (0.25, 0.5, 1, 2, 4)


def with_growth(
    report: Report, batch_size: int, checkpoint: CheckpointSetting, schedule: Callable[[int], Schedule]
) -> Report:
    """Returns a report with what activations take with fewer and with more micro-batches.

    Args:
        report: the report of a step with backwards.
        batch_size: the number of samples.
        checkpoint: the checkpoint mode.
        schedule: returns the schedule of a number of micro-batches.
    """
    present = report.num_microbatches
    stages = range(len(report.stages))
    events = [event for phase in report.phases for event in phase.events.values()]
    boundary, saved = (
        [_most(events, stage, Kind.F, kind) for stage in stages] for kind in (_BOUNDARY, _SAVED)
    )
    # What is kept in addition between a backward's two halves, of micro-batches that recompute and of others.
    policy = checkpoint_policy(checkpoint, len(stages), training=True)
    now = policy.recomputed(present)
    halves = {
        again: [
            _most(own, i, Kind.I, _BOTH) - _most(own, i, Kind.F, _BOTH) if own else 0
            for i in stages
            for own in [[e for e in events if ((i, e.action.microbatch) in now) == again]]
        ]
        for again in (True, False)
    }
    if not any(boundary) and not any(saved):  # Python layers: what autograd keeps is unknown
        return report
    found = []
    for count in sorted({-(-batch_size // -(-batch_size // max(1, int(f * present)))) for f in _FACTORS}):
        size = -(-batch_size // count) / -(-batch_size // present)  # of a micro-batch, relative
        shares = [policy.saved_fractions(i, count) for i in stages]

        def kept(
            stage: int, m: int, size: float = size, shares: list[list[float]] = shares
        ) -> tuple[float, float]:
            share = shares[stage][m]  # saved is what the micro-batches with the greatest share keep
            first = boundary[stage] + (saved[stage] * share / max(shares[stage]) if share else 0)
            return size * first, size * max(0, halves[has_recompute(share)][stage])

        most = peaks(schedule(count), kept)
        scratch = [size * own.scratch for own in report.memory]
        inputs = [present * own for own in boundary]
        found.append(
            Growth(
                count,
                int(max(map(sum, zip(most, scratch, strict=True)))),
                int(max(a + size * b + c for a, b, c in zip(inputs, saved, scratch, strict=True))),
            )
        )
    return replace(report, growth=tuple(found))


def _most(events: Sequence[Event], stage: int, kind: Kind, names: Sequence[str]) -> int:
    """Returns the maximum that a stage keeps of a micro-batch after an action of a kind; 0 without one."""
    own = (event for event in events if event.action.stage == stage and event.action.kind is kind)
    return max((sum(getattr(event, name) for name in names) for event in own), default=0)


_BOUNDARY, _SAVED = ("boundary_bytes",), ("saved_bytes",)
_BOTH = (*_BOUNDARY, *_SAVED)
