"""The schedules of a step by name, each with a timeline, and the choice of one.

In the timelines, a column is one tick: the duration of a forward or a backward, or of a part of a split
backward. Transfers take no time and are not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from typing import Any

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

    K = 3 stages, M = 4 micro-batches::

        stage 0  0F0 0F1 0F2 0F3  .   .   .   .  0B3 0B2 0B1 0B0
        stage 1   .  1F0 1F1 1F2 1F3  .   .  1B3 1B2 1B1 1B0
        stage 2   .   .  2F0 2F1 2F2 2F3 2B3 2B2 2B1 2B0

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


def one_f_one_b(num_stages: int, num_microbatches: int, *, recomputed: Recomputed | None = None) -> Schedule:
    """Returns the schedule 1F1B.

    K = 3 stages, M = 4 micro-batches::

        stage 0  0F0 0F1 0F2  .   .  0B0 0F3 0B1  .  0B2  .  0B3
        stage 1   .  1F0 1F1  .  1B0 1F2 1B1 1F3 1B2  .  1B3
        stage 2   .   .  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

    Source: PipeDream-Flush in arXiv 2006.09503, section 3.2. Gradients are added up in the order of the
    micro-batches, and not in the opposite order as by fill-drain.

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


def zb_h1(num_stages: int, num_microbatches: int, *, recomputed: Recomputed | None = None) -> Schedule:
    """Returns the schedule ZB-H1.

    K = 3 stages, M = 4 micro-batches; F, I and W take equally long::

        stage 0  0F0 0F1 0F2  .   .  0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        stage 1   .  1F0 1F1  .  1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        stage 2   .   .  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    Source: arXiv 2401.10241, section 3: as many micro-batches as with 1F1B are in flight, and a stage
    computes weight gradients where it would wait. If F, I and W take equally long, the bubble is a third of
    that of 1F1B with whole backwards, and half of that of 1F1B whose stages send an I's gradient before W.

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


def interleaved(
    num_stages: int,
    num_microbatches: int,
    *,
    num_ranks: int | None = None,
    recomputed: Recomputed | None = None,
) -> Schedule:
    """Returns interleaved 1F1B, for any number of micro-batches.

    K = 4 stages on 2 ranks, stage i on rank i mod 2; M = 4 micro-batches::

        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3 0B2 0B3
        rank 1   .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    Source: arXiv 2104.04473, section 2.2. The bubble is that of 1F1B divided by the number of stages of a
    rank.

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


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": fill_drain,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
}
"""The schedules of a step, by name."""

ScheduleChoice = str | Schedule | Callable[[int, int], Schedule]


def schedule_for(
    choice: ScheduleChoice,
    num_stages: int,
    num_microbatches: int,
    *,
    num_devices: int = 1,
    recomputed: Recomputed | None = None,
) -> Schedule:
    """Returns the schedule of a step.

    Args:
        choice: a key of `SCHEDULES`, a schedule, or a function of the number of stages and of micro-batches.
        num_stages: K.
        num_microbatches: M.
        num_devices: the number of different devices: that of the ranks of ``'interleaved'``, if over 1.
        recomputed: as for `Schedule.of`.

    Raises:
        TypeError: the function returns no schedule.
        ValueError: there is no schedule of that name; or the schedule is for other numbers, lacks forwards or
            backwards, or runs the forwards of a stage in another order than that of the micro-batches.
    """
    if isinstance(choice, str) and choice not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, or a Schedule, got {choice!r}")
    if isinstance(choice, str):
        has_ranks = choice == "interleaved" and num_devices > 1
        options: dict[str, Any] = {"num_ranks": num_devices} if has_ranks else {}
        return SCHEDULES[choice](num_stages, num_microbatches, recomputed=recomputed, **options)
    found = choice if isinstance(choice, Schedule) else choice(num_stages, num_microbatches)
    if not isinstance(found, Schedule):
        raise TypeError(
            "a function that is passed as schedule must return a gpipe_fast.schedule.Schedule, got "
            f"{type(found).__name__}; make one by Schedule.of or Schedule.from_csv"
        )
    if (found.num_stages, found.num_microbatches) != (num_stages, num_microbatches):
        raise ValueError(
            f"the schedule has {found.num_stages} stages and {found.num_microbatches} micro-batches, but the "
            f"step has {num_stages} and {num_microbatches}; set schedule to a function of both numbers that "
            "returns one"
        )
    for stage, actions in enumerate(found.stages):
        forwards = [action.microbatch for action in actions if action.kind is Kind.F]
        has_backward = any(action.kind in (Kind.B, Kind.I) for action in actions)
        if forwards != sorted(forwards) or not forwards or not has_backward:
            raise ValueError(
                f"stage {stage} runs the forwards of micro-batches {forwards} and "
                f"{'backwards' if has_backward else 'no backwards'}; a step runs both of all micro-batches, "
                "and the forwards in ascending order, because layers may update buffers"
            )
    return Schedule.of(found.ranks, num_microbatches, slots=found.slots, recomputed=recomputed)
