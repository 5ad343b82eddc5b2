"""Traces in the trace event format: slices, flows and counters, in microseconds."""

from __future__ import annotations

import json

from gpipe_fast.reports.timeline import Arrow, Row, Span, Timeline, trace_events
from gpipe_fast.schedule import Action, Kind

FIRST, LAST = Action(0, Kind.F, 0), Action(1, Kind.F, 0)
ROWS = [
    Row("stage 0", (0,), [(FIRST, Span(0.0, 1.0))], [], [], [(1.0, 64)]),
    Row(
        "stage 1", (1,), [(LAST, Span(1.5, 2.0))], [(LAST, Span(0.5, 1.5))], [("transfer", Span(0, 1.5))], []
    ),
]


def found(between: list[Span]) -> list[dict[str, object]]:
    arrows = [Arrow(0, 1.0, 1, 1.5, True)]
    result = trace_events(Timeline(2.5, ROWS, arrows, between, frozenset({LAST})))
    assert json.loads(json.dumps(result)) == result
    assert result["displayTimeUnit"] == "ms"
    events: list[dict[str, object]] = result["traceEvents"]
    return events


def test_actions_waits_and_the_loss_are_slices() -> None:
    slices = [e for e in found([Span(2.0, 2.5)]) if e["ph"] == "X"]
    times = [(e["tid"], e["name"], e["cat"], e["ts"], e["dur"]) for e in slices]
    assert times == [
        (0, "0F0", "F", 0.0, 1e6),
        (1, "1F0", "F", 1.5e6, 0.5e6),
        (1, "wait for 1F0", "wait", 0.5e6, 1e6),
        (2, "loss", "loss", 2e6, 0.5e6),
    ]
    assert [e["args"] for e in slices if "args" in e] == [
        {"on the critical path": False},
        {"on the critical path": True},
    ]


def test_an_arrow_is_a_flow_from_its_sender_to_its_receiver() -> None:
    begin, end = (e for e in found([]) if e["ph"] in "sf")
    assert (begin["ph"], begin["tid"], begin["ts"]) == ("s", 0, 1e6)
    assert (end["ph"], end["tid"], end["ts"]) == ("f", 1, 1.5e6)
    assert begin["id"] == end["id"]


def test_kept_bytes_are_a_counter() -> None:
    (counter,) = (e for e in found([]) if e["ph"] == "C")
    assert (counter["tid"], counter["ts"], counter["args"]) == (0, 1e6, {"bytes": 64})


def test_a_step_without_a_loss_has_no_row_for_the_caller() -> None:
    names = [e["args"] for e in found([]) if e["ph"] == "M"]
    assert names == [{"name": "stage 0"}, {"name": "stage 1"}]
    assert {"name": "caller"} in [e["args"] for e in found([Span(2.0, 2.5)]) if e["ph"] == "M"]
