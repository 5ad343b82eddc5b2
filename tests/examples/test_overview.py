"""The overview of the examples lists every example, and its links exist."""

from __future__ import annotations

import re

from tests.docs.markdown import LINK, ROOT

EXAMPLES = ROOT / "examples"
TEXT = (EXAMPLES / "README.md").read_text(encoding="utf-8")


def test_every_example_is_listed() -> None:
    names = {path.parent.name for path in EXAMPLES.glob("*/__main__.py")}
    names |= {path.stem for path in EXAMPLES.glob("*.py")}
    assert set(re.findall(r"^\| \[(\w+)\]\(\1(?:/__main__)?\.py\) \|", TEXT, re.MULTILINE)) == names


def test_links_exist() -> None:
    links = [link.partition("#")[0] for link in LINK.findall(TEXT)]
    assert links
    assert [link for link in links if not (EXAMPLES / link).exists()] == []
