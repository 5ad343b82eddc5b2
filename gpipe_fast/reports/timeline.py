"""Timelines: a recorded step as rows, blocks and arrows, as pages and traces show it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from gpipe_fast.reports.blame import CAUSES, Gap, Phase
from gpipe_fast.reports.events import Event, kept_after
from gpipe_fast.schedule import Action, Kind


def timeline(phases: Sequence[Phase], gaps: Sequence[Gap], critical_path: Sequence[Action]) -> dict[str, Any]:
    """Returns the part of the data of `page.report_page` that is drawn; seconds since the step began.

    A row is a rank: the stages that run one after another on one device; mostly one stage.
    """
    windows = [phase.window for phase in phases]
    origin, end = windows[0][0], windows[-1][1]
    events = {action: event for phase in phases for action, event in phase.events.items()}
    waits = [event for phase in phases for event in phase.waits]
    rank_of = phases[0].schedule.rank_of
    num_ranks, critical = max(rank_of.values()) + 1, {*critical_path}
    noun = "rank" if num_ranks < len(rank_of) else "stage"

    def times(begin: float, end: float) -> dict[str, float]:
        # A stage may wait before the step's first action begins.
        return {"begin": max(begin, origin) - origin, "end": end - origin}

    def row(rank: int) -> dict[str, Any]:
        stages = [stage for stage in sorted(rank_of) if rank_of[stage] == rank]
        own, waited = (
            sorted((e for e in found if e.action.stage in stages), key=lambda e: (e.begin, e.end))
            for found in (events.values(), waits)
        )
        return {
            "name": f"{noun} {rank}",
            "note": f"stages {', '.join(map(str, stages))}" if len(stages) > 1 else "",
            "actions": [
                {"name": str(e.action), "kind": e.action.kind.value, "microbatch": e.action.microbatch}
                | {"critical": e.action in critical, **times(e.begin, e.end)}
                for e in own
            ],
            "waits": [{"name": str(e.action), **times(e.begin, e.end)} for e in waited],
            "idle": [
                {"cause": cause, **times(*part)} for g in gaps if g.rank == rank for cause, part in _parts(g)
            ],
            "memory": _memory(own, origin),
        }

    transfers = [(send, receive) for receive in events if (send := sender_of(receive)) is not None]
    return {
        "unit": "s",
        "begin": 0.0,
        "end": end - origin,
        "stages": [row(rank) for rank in range(num_ranks)],
        # From the begin of a SEND to the begin of its RECV.
        "arrows": [
            {
                "from": [rank_of[send.stage], events[send].begin - origin],
                "to": [rank_of[receive.stage], events[receive].begin - origin],
                "critical": {send, receive} <= critical,
            }
            for send, receive in transfers
        ],
        "between": [[a[1] - origin, b[0] - origin] for a, b in pairwise(windows)],
    }


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


def _memory(own: Sequence[Event], origin: float) -> list[list[float]]:
    """Returns what the stages of some events keep, from the end of each on; empty if that is nothing."""
    curve = [[event.end - origin, boundary + saved] for event, boundary, saved in kept_after(own)]
    return curve if any(kept for _, kept in curve) else []


def trace_events(found: dict[str, Any]) -> dict[str, Any]:
    """Returns a timeline in the trace event format of Perfetto and chrome://tracing; times are in µs.

    A row is a thread. Actions, waits and the caller's loss are slices, arrows are flows, and the bytes that a
    row keeps are a counter.
    """
    events: list[dict[str, Any]] = []

    def named(thread: int, name: str) -> dict[str, Any]:
        place = {"pid": 0, "tid": thread}
        events.append({"ph": "M", "name": "thread_name", "args": {"name": name}, **place})
        return place

    def slice_of(name: str, category: str, begin: float, end: float) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": category, "ts": begin * 1e6, "dur": (end - begin) * 1e6}

    for thread, row in enumerate(found["stages"]):
        place = named(thread, row["name"])
        for a in row["actions"]:
            critical = {"args": {"on the critical path": a["critical"]}}
            events.append(slice_of(a["name"], a["kind"], a["begin"], a["end"]) | place | critical)
        for wait in row["waits"]:
            events.append(slice_of(f"wait for {wait['name']}", "wait", wait["begin"], wait["end"]) | place)
        for time, kept in row["memory"]:
            counter = {"name": f"{row['name']} keeps", "ts": time * 1e6, "args": {"bytes": kept}}
            events.append({"ph": "C", **counter, **place})
    if found["between"]:
        caller = named(len(found["stages"]), "caller")
        events += [slice_of("loss", "loss", *span) | caller for span in found["between"]]
    for number, arrow in enumerate(found["arrows"]):
        common = {"cat": "transfer", "name": "boundary", "id": number, "pid": 0}
        for end, phase in (("from", {"ph": "s"}), ("to", {"ph": "f", "bp": "e"})):
            thread, time = arrow[end]
            events.append({**phase, "tid": thread, "ts": time * 1e6, **common})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
