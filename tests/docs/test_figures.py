"""Figures in the tables of a page are those of the files in bench/results that the page names beside them."""

from __future__ import annotations

import re
import shutil
import subprocess
from decimal import Decimal
from pathlib import Path

import pytest

from tests.docs.markdown import FENCE, ROOT, TABLE

RESULTS = ROOT / "bench" / "results"
FIGURE = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.%])")
# The text between a table and the heading, or the table, before it.
INTRODUCED = re.compile(rf"(?P<text>(?:^(?!\||#).*\n)+)(?P<table>{TABLE.pattern})", re.MULTILINE)


def measured_tables(page: Path) -> list[tuple[set[str], str]]:
    """Returns for each table after a text that names files in bench/results: the files, and the table."""
    found = []
    for match in INTRODUCED.finditer(FENCE.sub("", page.read_text())):
        files = {name for name in re.findall(r"([\w-]+\.md)`", match["text"]) if (RESULTS / name).exists()}
        if files:
            found.append((files, match["table"]))
    return found


def rounds_to(measured: str, figure: str) -> bool:
    """Returns whether a measured figure is the page's figure, rounded to as many decimals as the page has."""
    decimals = len(figure.partition(".")[2])
    return len(measured.partition(".")[2]) >= decimals and (
        abs(Decimal(measured) - Decimal(figure)) <= Decimal(5) / 10 ** (decimals + 1)
    )


def test_the_figures_of_a_table_are_in_the_files_that_the_page_names() -> None:
    number = 0
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for files, table in measured_tables(page):
            known = {figure for file in files for figure in FIGURE.findall((RESULTS / file).read_text())}
            figures = FIGURE.findall(table)
            assert [f for f in figures if not any(rounds_to(one, f) for one in known)] == [], page
            number += len(figures)
    assert number >= 50


def test_the_performance_page_lists_every_committed_file_of_results() -> None:
    """`make gpu` writes others, which are listed when they are committed."""
    page = (ROOT / "docs" / "performance.md").read_text()
    listed = set(re.findall(r"^\| `([\w-]+\.md)` \|", page, re.MULTILINE))
    assert listed == committed_results()


def committed_results() -> set[str]:
    """Returns the names of the committed files of results; skips the test outside of a git checkout."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    command = ["git", "ls-files", "*.md"]
    done = subprocess.run(command, cwd=RESULTS, capture_output=True, text=True, timeout=300)
    # A copy inside of another repository, such as the build folder of this one, has no committed file.
    if done.returncode or not done.stdout:
        pytest.skip(f"not a git checkout: {done.stderr.strip() or 'no file is committed'}")
    return set(done.stdout.split())
