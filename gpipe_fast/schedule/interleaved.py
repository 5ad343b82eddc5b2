"""Interleaved 1F1B: a rank runs several shorter stages in turn, and so waits less for others.

K = 4 stages on 2 ranks, stage i on rank i mod 2; M = 4 micro-batches::

    rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3 0B2 0B3
    rank 1   .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

Source: arXiv 2104.04473, section 2.2. The bubble is that of 1F1B divided by the number of stages of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

from gpipe_fast.schedule.actions import Action, Kind, Recomputed
from gpipe_fast.schedule.schedule import Schedule


def interleaved(
    num_stages: int,
    num_microbatches: int,
    *,
    num_ranks: int | None = None,
    recomputed: Recomputed | None = None,
) -> Schedule:
    """Returns interleaved 1F1B, for any number of micro-batches.

    Args:
        num_stages: K.
        num_microbatches: M.
        num_ranks: the number of ranks, which divides K; None for half as many as stages.
        recomputed: the micro-batches that recompute; as for `fill_drain`, backwards are split if given.

    Raises:
        ValueError: a number is not positive, or ranks would have unequal numbers of stages.
    """
    if num_ranks is None:
        num_ranks = max(1, num_stages // 2)
    if num_ranks < 1 or num_stages % num_ranks:
        raise ValueError(
            f"an interleaved schedule gives every rank equally many stages, got {num_stages} stages for "
            f"{num_ranks} ranks; choose a balance with a multiple of {max(1, num_ranks)} stages"
        )
    per_rank = num_stages // num_ranks
    num_rounds = -(-num_microbatches // num_ranks)
    ranks = []
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        forwards = _in_rounds(Kind.F, stages, num_rounds, num_ranks)
        backwards = _in_rounds(Kind.B, stages[::-1], num_rounds, num_ranks)
        # Before its first backward, a rank has run the first round on all of its stages but the last, and two
        # more micro-batches for each later rank.
        ahead = (per_rank - 1) * num_ranks + 2 * (num_ranks - 1 - rank) + 1
        pairs = chain(*zip_longest(backwards, forwards[ahead:]))
        # The last round may lack micro-batches.
        order = (action for action in (*forwards[:ahead], *pairs) if action is not None)
        ranks.append([action for action in order if action.microbatch < num_microbatches])
    return Schedule.of(ranks, num_microbatches, recomputed=recomputed)


def _in_rounds(kind: Kind, stages: Sequence[int], num_rounds: int, size: int) -> list[Action]:
    """Returns a rank's forwards or backwards: each round of micro-batches on one stage after another."""
    return [
        Action(stage, kind, m)
        for begin in range(0, num_rounds * size, size)
        for stage in stages
        for m in range(begin, begin + size)
    ]
