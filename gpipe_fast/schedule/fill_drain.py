"""Fill-drain, GPipe's schedule: all forwards, then all backwards, the last micro-batch first.

K = 3 stages, M = 4 micro-batches. A column is one tick, the duration of a forward or a backward. Transfers
take no time and are not drawn::

    stage 0  0F0 0F1 0F2 0F3  .   .   .   .  0B3 0B2 0B1 0B0
    stage 1   .  1F0 1F1 1F2 1F3  .   .  1B3 1B2 1B1 1B0
    stage 2   .   .  2F0 2F1 2F2 2F3 2B3 2B2 2B1 2B0
"""

from __future__ import annotations

from gpipe_fast.schedule.actions import Action, Kind, Recomputed
from gpipe_fast.schedule.schedule import Schedule


def fill_drain(
    num_stages: int,
    num_microbatches: int,
    *,
    slots: int | None = None,
    backward: bool = True,
    recomputed: Recomputed | None = None,
) -> Schedule:
    """Returns GPipe's schedule: all forwards, then all backwards, the last micro-batch first.

    Args:
        num_stages: K.
        num_microbatches: M.
        slots: boundary tensors that may wait on a connection, in one direction; None means M: no SEND waits.
        backward: False for inference.
        recomputed: the micro-batches that recompute. If given, backwards are split, so that no action waits
            for a tensor that it does not need: a stage recomputes before the boundary gradient arrives, and
            sends its own boundary gradient before it computes weight gradients. If all micro-batches
            recompute, and F, R, I and W take equally long, all backwards take 3 M + K - 1 ticks. None means
            full backwards, which then take 3 (M + K - 1) ticks.

    Raises:
        ValueError: a number is not positive.
    """
    forwards, backwards = range(num_microbatches), reversed(range(num_microbatches))
    order = [(Kind.F, m) for m in forwards] + [(Kind.B, m) for m in backwards if backward]
    ranks = ([Action(stage, kind, m) for kind, m in order] for stage in range(num_stages))
    return Schedule.of(ranks, num_microbatches, slots=slots, recomputed=recomputed)


def bubble(num_stages: int, num_microbatches: int) -> float:
    """Returns the fraction of fill-drain in which a stage is idle.

    (K - 1) / (M + K - 1), from arXiv 1811.06965, section 2.3. The formula assumes that all stages take
    equally long and that transfers take no time. Split backwards have a smaller bubble.

    Raises:
        ValueError: a number is not positive.
    """
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"expected at least one stage and one micro-batch, got {num_stages} stages, {num_microbatches} "
            "micro-batches"
        )
    return (num_stages - 1) / (num_microbatches + num_stages - 1)
