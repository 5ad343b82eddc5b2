"""Tables and reports as text, as HTML and as plain data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gpipe_fast.reports.tables import Printed, Table, plain, size

ROWS = [["a", "large & wide", "10.00"], ["bcd", "<small>", "1.00"]]
TABLE = Table("Sizes", ["name", "why", "MiB"], ROWS, ["why"])


class Pair(NamedTuple):
    first: int
    second: tuple[str, ...]


@dataclass(frozen=True)
class Report(Printed):
    pairs: tuple[Pair, ...]
    settings: dict[str, object]

    def _parts(self) -> Iterator[str | Table]:
        yield "1 < 2"
        yield TABLE


def test_texts_are_aligned_left_and_numbers_right() -> None:
    assert TABLE.text().splitlines() == [
        "Sizes",
        "name    why             MiB",
        "------  ------------  -----",
        "a       large & wide  10.00",
        "bcd     <small>        1.00",
    ]


def test_a_report_is_text_and_html() -> None:
    report = Report((), {})
    assert str(report) == f"1 < 2\n\n{TABLE.text()}"
    html = report._repr_html_()
    assert html.startswith("<p>1 &lt; 2</p>\n<p>Sizes</p>\n<table>")
    assert "&lt;small&gt;" in html


def test_plain_data_is_json() -> None:
    found = plain(Report((Pair(1, ("a", "b")),), {"balance": (2, 3)}))
    assert found == {"pairs": [{"first": 1, "second": ["a", "b"]}], "settings": {"balance": [2, 3]}}
    assert json.loads(json.dumps(found)) == found


def test_bytes_choose_their_unit() -> None:
    assert [size(x) for x in (0, 1023, 1024, 5 * 2**19, 3 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "2.50 MiB",
        "3.00 GiB",
    ]
