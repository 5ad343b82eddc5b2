"""Reads Markdown: code blocks and tables of the README, the pages in docs/ and the files in bench/results."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
TABLE = re.compile(r"(?:^\|.*\|\n)+", re.MULTILINE)

Row = dict[str, str]


def parse_table(text: str) -> list[Row]:
    """Returns the rows of a table, each from the column's heading to the cell's text."""
    lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines()]
    headings, _, *rows = lines
    return [dict(zip(headings, row, strict=True)) for row in rows]


def tables_of(text: str) -> list[list[Row]]:
    """Returns all tables of a page, in order."""
    return [parse_table(table) for table in TABLE.findall(FENCE.sub("", text))]
