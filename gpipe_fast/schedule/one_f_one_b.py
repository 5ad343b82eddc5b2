"""1F1B: every stage runs a backward as soon as it can, so that it keeps at most K micro-batches.

K = 3 stages, M = 4 micro-batches; a column is one tick::

    stage 0  0F0 0F1 0F2  .   .  0B0 0F3 0B1  .  0B2  .  0B3
    stage 1   .  1F0 1F1  .  1B0 1F2 1B1 1F3 1B2  .  1B3
    stage 2   .   .  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

Source: PipeDream-Flush in arXiv 2006.09503, section 3.2. Gradients are added up in the order of the
micro-batches, and not in the opposite order as by fill-drain.
"""

from __future__ import annotations

from itertools import zip_longest

from gpipe_fast.schedule.actions import Action, Kind, Recomputed
from gpipe_fast.schedule.schedule import Schedule


def one_f_one_b(
    num_stages: int,
    num_microbatches: int,
    *,
    recomputed: Recomputed | None = None,
) -> Schedule:
    """Returns the schedule 1F1B.

    Args:
        num_stages: K.
        num_microbatches: M.
        recomputed: the micro-batches that recompute; as for `fill_drain`, backwards are split if given.

    Raises:
        ValueError: a number is not positive.
    """
    ranks = []
    for stage in range(num_stages):
        ahead = min(num_stages - stage, num_microbatches)  # forwards before the first backward
        forwards, backwards = (
            [Action(stage, kind, m) for m in range(num_microbatches)] for kind in (Kind.F, Kind.B)
        )
        pairs = zip_longest(backwards, forwards[ahead:])
        ranks.append([*forwards[:ahead], *(action for pair in pairs for action in pair if action)])
    return Schedule.of(ranks, num_microbatches, recomputed=recomputed)
