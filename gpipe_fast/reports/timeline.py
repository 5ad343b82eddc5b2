"""Timelines: a recorded step as rows, blocks and arrows, for pictures, pages and traces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from gpipe_fast.reports.blame import CAUSES, Gap, Phase
from gpipe_fast.reports.events import Event, kept_after
from gpipe_fast.schedule import Action, Kind


class Span(NamedTuple):
    """An interval, in seconds since the step began."""

    begin: float
    end: float


class Row(NamedTuple):
    """A rank: the stages that run one after another on one device; mostly one stage.

    Attributes:
        title: such as ``stage 0``.
        stages: the indices of its stages.
        blocks: its actions, by time.
        waits: its waits at slots, by the action that waited, by time.
        idle: the intervals in which it computes nothing, each part with its cause, by time.
        memory: times and the bytes that it keeps for backwards from then on; empty if unknown.
    """

    title: str
    stages: tuple[int, ...]
    blocks: list[tuple[Action, Span]]
    waits: list[tuple[Action, Span]]
    idle: list[tuple[str, Span]]
    memory: list[tuple[float, int]]


class Arrow(NamedTuple):
    """A transfer: from the begin of a SEND to the begin of its RECV, each with the index of its row.

    It is critical if both actions are on the critical path.
    """

    sender: int
    begin: float
    receiver: int
    end: float
    is_critical: bool


class Timeline(NamedTuple):
    """A recorded step.

    Attributes:
        seconds: the time from the first begin to the last end.
        rows: one for each rank.
        arrows: the transfers.
        between: the intervals in which the caller computes the loss.
        critical: the actions of the critical path.
    """

    seconds: float
    rows: list[Row]
    arrows: list[Arrow]
    between: list[Span]
    critical: frozenset[Action]


def timeline(phases: Sequence[Phase], gaps: Sequence[Gap], critical_path: Sequence[Action]) -> Timeline:
    """Returns the timeline of the runs of a step."""
    windows = [phase.window for phase in phases]
    origin, end = windows[0][0], windows[-1][1]

    def span(begin: float, end: float) -> Span:
        return Span(begin - origin, end - origin)

    events = {action: event for phase in phases for action, event in phase.events.items()}
    waits = [event for phase in phases for event in phase.waits]
    rank_of = phases[0].schedule.rank_of
    ranks = range(max(rank_of.values()) + 1)
    stages = [tuple(stage for stage in sorted(rank_of) if rank_of[stage] == rank) for rank in ranks]
    is_shared = len(ranks) < len(rank_of)
    critical = frozenset(critical_path)

    def blocks(found: Sequence[Event], rank: int) -> list[tuple[Action, Span]]:
        own = [event for event in found if event.action.stage in stages[rank]]
        own.sort(key=lambda event: (event.begin, event.end))
        # A stage may wait before the step's first action begins.
        return [(event.action, span(max(event.begin, origin), event.end)) for event in own]

    rows = [
        Row(
            title=f"rank {rank}" if is_shared else f"stage {rank}",
            stages=stages[rank],
            blocks=blocks(list(events.values()), rank),
            waits=blocks(waits, rank),
            idle=[(cause, span(*part)) for gap in gaps if gap.rank == rank for cause, part in _parts(gap)],
            memory=[(seconds - origin, kept) for seconds, kept in _memory(events, stages[rank])],
        )
        for rank in ranks
    ]
    return Timeline(
        seconds=end - origin,
        rows=rows,
        arrows=[
            Arrow(
                rank_of[send.stage],
                events[send].begin - origin,
                rank_of[receive.stage],
                events[receive].begin - origin,
                is_critical={send, receive} <= critical,
            )
            for receive in events
            if (send := sender_of(receive)) is not None
        ],
        between=[span(a[1], b[0]) for a, b in pairwise(windows)],
        critical=critical,
    )


def sender_of(receive: Action) -> Action | None:
    """Returns the SEND of a RECV; None for other actions."""
    stage, m = receive.stage, receive.microbatch
    if receive.kind is Kind.RECV_F:
        return Action(stage - 1, Kind.SEND_F, m)
    return Action(stage + 1, Kind.SEND_B, m) if receive.kind is Kind.RECV_B else None


def _parts(gap: Gap) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yields the parts of a gap, one after the other, without those below a nanosecond."""
    begin = gap.begin
    for cause in CAUSES:
        seconds = gap.seconds[cause]
        if seconds > 1e-9:
            yield cause, (begin, begin + seconds)
            begin += seconds


def _memory(events: dict[Action, Event], stages: Sequence[int]) -> list[tuple[float, int]]:
    """Returns what the stages keep, from the end of each action on."""
    own = [event for action, event in events.items() if action.stage in stages]
    curve = [(event.end, boundary + saved) for event, boundary, saved in kept_after(own)]
    return curve if any(kept for _, kept in curve) else []


def trace_events(found: Timeline) -> dict[str, Any]:
    """Returns a timeline in the trace event format of Perfetto and chrome://tracing; times are in µs.

    A row is a thread. Actions, waits and the caller's loss are slices, arrows are flows, and the bytes that a
    row keeps are a counter.
    """
    events: list[dict[str, Any]] = []
    for thread, row in enumerate(found.rows):
        place = {"pid": 0, "tid": thread}
        events.append({"ph": "M", "name": "thread_name", "args": {"name": row.title}, **place})
        for action, span in row.blocks:
            critical = {"args": {"on the critical path": action in found.critical}}
            events.append(_slice(str(action), action.kind.value, span) | place | critical)
        events += [_slice(f"wait for {action}", "wait", span) | place for action, span in row.waits]
        events += [
            {"ph": "C", "name": f"{row.title} keeps", "ts": time * 1e6, "args": {"bytes": kept}, **place}
            for time, kept in row.memory
        ]
    caller = {"pid": 0, "tid": len(found.rows)}
    if found.between:
        events.append({"ph": "M", "name": "thread_name", "args": {"name": "caller"}, **caller})
    events += [_slice("loss", "loss", span) | caller for span in found.between]
    for number, arrow in enumerate(found.arrows):
        common = {"cat": "transfer", "name": "boundary", "id": number, "pid": 0}
        events.append({"ph": "s", "tid": arrow.sender, "ts": arrow.begin * 1e6, **common})
        events.append({"ph": "f", "bp": "e", "tid": arrow.receiver, "ts": arrow.end * 1e6, **common})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slice(name: str, category: str, span: Span) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": span.begin * 1e6,
        "dur": (span.end - span.begin) * 1e6,
    }
