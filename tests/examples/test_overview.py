"""The overview of the examples lists every example, and its links and commands exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = (EXAMPLES / "README.md").read_text(encoding="utf-8")


def test_every_example_is_listed() -> None:
    folders = {path.parent.name for path in EXAMPLES.glob("*/__main__.py")}
    assert set(re.findall(r"^\| \[(\w+)\]\(\1/__main__\.py\) \|", TEXT, re.MULTILINE)) == folders


def test_links_and_commands_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    assert [link for link in links if not (EXAMPLES / link).exists()] == []
    modules = re.findall(r"-m (\S+)", TEXT)
    assert modules
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []
