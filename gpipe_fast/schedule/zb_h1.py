"""ZB-H1: 1F1B whose weight gradients fill the bubble.

K = 3 stages, M = 4 micro-batches; a column is one tick, and F, I and W take equally long::

    stage 0  0F0 0F1 0F2  .   .  0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    stage 1   .  1F0 1F1  .  1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    stage 2   .   .  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

Source: arXiv 2401.10241, section 3: as many micro-batches as with 1F1B are in flight, and a stage computes
weight gradients where it would wait. If F, I and W take equally long, the bubble is a third of that of 1F1B
with whole backwards, and half of that of 1F1B whose stages send an I's gradient before the W.
"""

from __future__ import annotations

from gpipe_fast.schedule.actions import Action, Kind, Recomputed
from gpipe_fast.schedule.schedule import Schedule


def zb_h1(
    num_stages: int,
    num_microbatches: int,
    *,
    recomputed: Recomputed | None = None,
) -> Schedule:
    """Returns the schedule ZB-H1.

    Args:
        num_stages: K.
        num_microbatches: M.
        recomputed: the micro-batches that recompute.

    Raises:
        ValueError: a number is not positive.
    """
    ranks = []
    for stage in range(num_stages):
        ahead = min(num_stages - stage, num_microbatches)  # forwards before the first backward
        order = [(Kind.F, m) for m in range(ahead)]
        for m in range(num_microbatches):
            # A stage waits longer for its next forward, and delays more weight gradients, the later it is.
            order += [(Kind.I, m)] + [(Kind.W, m - stage)] * (m >= stage)
            order += [(Kind.F, m + ahead)] * (m + ahead < num_microbatches)
        order += [(Kind.W, m) for m in range(max(0, num_microbatches - stage), num_microbatches)]
        ranks.append([Action(stage, kind, m) for kind, m in order])
    return Schedule.of(ranks, num_microbatches, recomputed=recomputed)
