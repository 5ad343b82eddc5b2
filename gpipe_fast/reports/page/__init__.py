"""HTML pages with a timeline: a pipeline to play with, and the report of a recorded step.

Both pages are single files that load nothing, and share ``drawing.js``. The first is ``docs/pipeline.html``,
which simulates steps in the browser by ``simulation.js``. Make it anew after a change of its parts::

    python -c 'from gpipe_fast.reports import page; print(page.pipeline_page(), end="")' > docs/pipeline.html
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


def pipeline_page() -> str:
    """Returns the page on which one can touch a simulated pipeline."""
    return _filled("pipeline.html")


def report_page(data: Mapping[str, Any], title: str) -> str:
    """Returns a page with the timeline and the tables of a recorded step.

    Args:
        data: the step, as lists, dicts, strings and numbers. A list may be empty::

            {"headline": str,                # sentences below the title, a line each
             "unit": "s",                    # of all times; "s" is shown as s, ms or µs
             "begin": float, "end": float,   # the limits of the time axis
             "stages": [                     # a row each
                {"name": "stage 0",
                 "note": str,                # optional, shown below the name
                 "actions": [{"name": "0F0", "kind": "F", "microbatch": 0, "begin": float, "end": float,
                              "critical": bool}],
                 "waits": [{"name": "0RECV_B1", "begin": float, "end": float}],  # the awaited action
                 "idle": [{"begin": float, "end": float, "cause": str}],  # one of `recording.blame.CAUSES`
                 "memory": [[time, bytes]]}],  # each value holds from its time on
             "arrows": [{"from": [stage, time], "to": [stage, time], "critical": bool}],
             "between": [[begin, end]],      # where the caller computes the loss; idle time leaves it out
             "tables": [{"caption": str, "headers": [str], "rows": [[str or number]],
                         "code": [1]}]}      # optional: the columns that contain code to copy

            The actions of a stage must not overlap. Times need not be sorted.
        title: the title of the page.

    Raises:
        ValueError: a number is not finite.
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return _filled("report.html", title=html.escape(title), data=text)


def _filled(template: str, **values: str) -> str:
    """Replaces ``{{name}}`` in a template by a value, or by the file of that name."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        return values[name] if name in values else (_FOLDER / name).read_text(encoding="utf-8")

    return re.sub(r"\{\{([\w.]+)\}\}", value, (_FOLDER / template).read_text(encoding="utf-8"))
