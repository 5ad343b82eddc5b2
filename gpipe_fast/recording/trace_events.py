"""Traces of recorded steps in the trace event format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from typing import Any

from gpipe_fast.recording.timeline import Span, Timeline


def trace(found: Timeline) -> dict[str, Any]:
    """Returns a timeline in the trace event format, with times in microseconds.

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
