"""HTML pages are complete single files; tests/browser/ tests what they show and do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gpipe_fast.reports.blame import CAUSES
from gpipe_fast.reports.page import pipeline_page, report_page

ROOT = Path(__file__).parents[3]
DATA = {"headline": "step 3 s", "end": 3.0, "stages": [{"name": "stage </script>", "actions": []}]}


def test_the_page_in_the_documentation_is_up_to_date() -> None:
    """The docstring of the module says how to make it anew."""
    assert (ROOT / "docs" / "pipeline.html").read_text(encoding="utf-8") == pipeline_page()


@pytest.mark.parametrize("text", [pipeline_page(), report_page(DATA, "A title")], ids=["pipeline", "report"])
def test_pages_are_complete_and_load_nothing(text: str) -> None:
    assert "{{" not in re.sub(r"\$\{\{", "", text)
    assert not re.search(r"(?:src|href)=\"(?!data:|https://arxiv)", text)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket", text)


def test_data_and_title_are_escaped() -> None:
    text = report_page(DATA, "<b> & co")
    assert "<title>&lt;b&gt; &amp; co</title>" in text
    match = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    assert json.loads(match[1]) == DATA


def test_numbers_that_json_lacks_are_an_error() -> None:
    with pytest.raises(ValueError):
        report_page({**DATA, "end": float("nan")}, "A title")


def test_the_report_page_knows_every_cause() -> None:
    folder = ROOT / "gpipe_fast" / "reports" / "page"
    assert f"const CAUSES = {json.dumps(list(CAUSES))};" in (folder / "report.js").read_text()
    style = (folder / "page.css").read_text()
    assert all(style.count(f"--cause-{cause.replace(' ', '-')}:") == 2 for cause in CAUSES)
