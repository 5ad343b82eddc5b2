"""docs/architecture.md agrees with the tree: its paths, names, packages, directions and contracts."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
FENCE = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# `path/to/file: Name, Class.method`. Without a slash, only .py, .toml and .md files are paths.
REFERENCE = re.compile(r"(?P<path>[\w.-]*/[\w./-]*|[\w-]+\.(?:py|toml|md))(?:: (?P<names>.+))?")
CONTRACTS = re.findall(r"^### Contract (\d+): ", TEXT, re.MULTILINE)


def references(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Returns every path in backticks, with the names after it."""
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    found = [match for span in spans if (match := REFERENCE.fullmatch(span))]
    return [(m["path"], tuple(m["names"].split(", ")) if m["names"] else ()) for m in found]


def is_defined(path: str, name: str) -> bool:
    """Returns whether a file has the scopes of a name, and seems to define or declare its last part."""
    *scopes, last = re.split(r"::|\.", name)
    code = re.sub(r"//[^\n]*", "", (ROOT / path).read_text())
    in_python = rf"^\s*(?:def|class) {last}\b|^\s*{last}\b[^=(\n]*[=:]"
    found = re.search(in_python if path.endswith(".py") else rf"\b{last}\b", code, re.MULTILINE)
    return bool(found) and all(re.search(rf"\b{scope}\b", code) for scope in scopes)


def section(title: str) -> str:
    """Returns the text below a heading, up to the next heading."""
    match = re.search(rf"^#+ {title}\n(.*?)(?=^#|\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert match, f"there is no heading {title!r}"
    return match[1]


def diagram(title: str) -> list[str]:
    """Returns the lines of the diagram in a section."""
    match = FENCE.search(section(title))
    assert match, f"{title} has no diagram"
    return match[1].splitlines()


def test_paths_and_names_in_the_document_exist() -> None:
    found = references(TEXT + GLOSSARY)
    assert len(found) > 150
    assert not [path for path, _ in found if not (ROOT / path).exists()]
    named = {(path, name) for path, names in found for name in names}
    assert len(named) > 120
    assert not sorted(f"{path}: {name}" for path, name in named if not is_defined(path, name))
    drawn = re.findall(r"\b\w+/[\w/.]+", " ".join(FENCE.findall(TEXT)))
    assert not [p for p in drawn if not (ROOT / p).exists() and not (ROOT / "gpipe_fast" / p).exists()]


def test_the_table_lists_every_package() -> None:
    python = [path.parent for path in (ROOT / "gpipe_fast").glob("*/__init__.py")]
    cpp = [path for path in (ROOT / "csrc").iterdir() if path.is_dir()]
    listed = re.findall(r"^\| `([^`]+)` \|", section("The packages"), re.MULTILINE)
    assert sorted(listed) == sorted(f"{path.relative_to(ROOT)}/" for path in (*python, *cpp))


def test_python_directions_equal_those_that_lint_checks() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [contract] = [c for c in settings["contracts"] if c.get("containers") == ["gpipe_fast"]]
    drawn = [set(re.split("[│▼]", line)[0].split()) for line in diagram("Directions in Python")]
    assert drawn == [set(layer.split(" | ")) for layer in contract["layers"]]


def test_cpp_directions_equal_those_that_lint_checks() -> None:
    below = runpy.run_path(str(ROOT / ".ci" / "check_includes.py"))["ALLOWED_INCLUDES"]
    drawn = [line.split("──▶") for line in diagram("Directions in C\\+\\+")]
    assert {folder.strip(): {*includes.split()} - {"nothing"} for folder, includes in drawn} == below


def test_contracts_name_their_tests_and_are_cited_by_number() -> None:
    titles = re.findall(r"^### (Contract \d+: .*)$", TEXT, re.MULTILINE)
    assert titles
    for title in titles:
        assert any(path.startswith("tests/") for path, _ in references(section(title))), title
    folders = ("gpipe_fast", "csrc", "tests", "bench", "tools", "examples", "docs")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    kept = [path for path in sources if path.suffix in (".py", ".h", ".cpp", ".cu", ".md")]
    cited = {number for path in kept for number in re.findall(r"\bContract (\d+)\b", path.read_text())}
    assert cited == {*CONTRACTS}
