"""docs/architecture.md agrees with the tree: its paths, names, packages, directions and contracts."""

from __future__ import annotations

import ast
import functools
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
CONTRACTS = (
    "same bits",
    "same randomness",
    "no interpreter",
    "only boundaries are kept",
    "nothing stale",
    "nothing silent",
    "all or nothing",
)


def references(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Returns every path in backticks, with the names after it."""
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    found = [match for span in spans if (match := REFERENCE.fullmatch(span))]
    return [(m["path"], tuple(m["names"].split(", ")) if m["names"] else ()) for m in found]


@functools.cache
def python_names(path: Path) -> frozenset[str]:
    """Returns the classes, functions and constants of a module, and the dotted names of class members."""

    def names(body: list[ast.stmt], prefix: str) -> set[str]:
        found = set()
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                found |= names(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
        return found

    return frozenset(names(ast.parse(path.read_text()).body, ""))


@functools.cache
def cpp_code(path: Path) -> str:
    """Returns a source without its comments and strings, in which a name proves nothing."""
    return re.sub(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"', "", path.read_text())


def cpp_defines(path: Path, name: str) -> bool:
    """Returns whether a file declares or defines a type, or a function in a scope.

    The file either declares the scope around the name, or writes the innermost scope before it.
    """
    *scopes, last = name.split("::")
    code = cpp_code(path)
    if re.search(rf"\b(?:struct|class) (?:\w+::)*{last}\b[^;(]*\{{|\benum class {last}\b", code):
        return all(re.search(rf"\b{scope}\b", code) for scope in scopes)
    if scopes and re.search(rf"\b{scopes[-1]}::{last}\(", code):
        return True
    declared = all(re.search(rf"\b(?:struct|class) (?:\w+::)*{scope}\b", code) for scope in scopes)
    # The name follows a type and is not part of an expression.
    return declared and bool(re.search(rf"^[^=\n]*[\w>&*](?<!return) [*&]?{last}\(", code, re.MULTILINE))


def is_defined(path: str, name: str) -> bool:
    file = ROOT / path
    return name in python_names(file) if file.suffix == ".py" else cpp_defines(file, name)


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


def packages() -> dict[str, list[str]]:
    """Returns the rows of the table of packages, by package."""
    rows = [line.split(" | ") for line in section("The packages").splitlines() if line.startswith("| `")]
    return {row[0].strip("| `"): row[1:] for row in rows}


def test_paths_in_the_document_exist() -> None:
    found = references(TEXT + GLOSSARY)
    assert len(found) > 150
    assert not [path for path, _ in found if not (ROOT / path).exists()]
    drawn = re.findall(r"\b\w+/[\w/.]+", " ".join(FENCE.findall(TEXT)))
    assert not [p for p in drawn if not (ROOT / p).exists() and not (ROOT / "gpipe_fast" / p).exists()]


def test_names_in_the_document_are_defined() -> None:
    named = {(path, name) for path, names in references(TEXT + GLOSSARY) for name in names}
    assert len(named) > 120
    assert not sorted(f"{path}: {name}" for path, name in named if not is_defined(path, name))


@pytest.mark.parametrize(
    "reference",
    [
        "gpipe_fast/gpipe.py: GPipe.forwards",
        "gpipe_fast/gpipe.py: forward",
        "gpipe_fast/trace/trace.py: GPipe",  # defined in another file
        "csrc/engine/engine.cpp: Engine::Pool::walks",
        "csrc/engine/engine.h: MiniBatch::run",  # a function of another class
        "csrc/pipeline/pipeline.cpp: MiniBatch::take_outputs",  # called, not defined
        "csrc/pipeline/pipeline.cpp: run_forward_step",  # only as Pipeline::run_forward_step
        "csrc/engine/slots.h: Action",
    ],
)
def test_undefined_names_are_detected(reference: str) -> None:
    [(path, [name])] = references(f"`{reference}`")
    assert not is_defined(path, name)


def test_the_table_lists_every_package() -> None:
    python = [path.parent for path in (ROOT / "gpipe_fast").glob("*/__init__.py")]
    cpp = [path for path in (ROOT / "csrc").iterdir() if path.is_dir()]
    assert sorted(packages()) == sorted(f"{path.relative_to(ROOT)}/" for path in (*python, *cpp))


def importers_of(package: str) -> set[str]:
    """Returns the other packages and modules of gpipe_fast that import from a package."""
    found = set()
    for path in (ROOT / "gpipe_fast").rglob("*.py"):
        importer = path.relative_to(ROOT / "gpipe_fast").parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                if any(f"{module}.".startswith(f"gpipe_fast.{package}.") for module in modules):
                    found.add(importer)
    return found - {package}


@pytest.mark.parametrize(
    "package", ["balance", "compat", "doctor", "lower", "reports", "runtime", "trace"], ids=str
)
def test_a_package_is_imported_only_by_those_that_the_table_names(package: str) -> None:
    named = re.findall(r"`(?:gpipe_fast/)?(\w+)(?:\.py)?`", packages()[f"gpipe_fast/{package}/"][2])
    assert importers_of(package) == set(named)


def test_python_directions_equal_those_that_lint_checks() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [contract] = [c for c in settings["contracts"] if c["type"] == "layers"]
    drawn = [set(re.split("[│▼]", line)[0].split()) for line in diagram("Directions in Python")]
    assert drawn == [set(layer.split(" | ")) for layer in contract["layers"]]


def test_cpp_directions_equal_those_that_lint_checks() -> None:
    below = runpy.run_path(str(ROOT / ".ci" / "check_includes.py"))["ALLOWED_INCLUDES"]
    drawn = {}
    for line in diagram("Directions in C\\+\\+"):
        folder, includes = line.split("──▶")
        drawn[folder.strip()] = set(includes.split()) - {"nothing"}
    assert drawn == below
    for folder in below:
        importers = packages()[f"csrc/{folder}/"][2]
        above = {other for other, under in below.items() if folder in under}
        assert above == (set() if importers.startswith("nothing") else set(importers.split(", "))), folder


@pytest.mark.parametrize(("number", "title"), list(enumerate(CONTRACTS, 1)), ids=CONTRACTS)
def test_every_contract_names_its_tests(number: int, title: str) -> None:
    named = {path for path, _ in references(section(f"Contract {number}: {title}"))}
    assert any(path.startswith("tests/") for path in named)
    cited = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__) and re.search(rf"\bContract {number}\b", path.read_text())
    }
    assert cited <= named


def test_every_cited_contract_is_defined() -> None:
    sources = [
        path
        for folder in ("gpipe_fast", "csrc", "tests", "bench", "tools", "examples", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".h", ".cpp", ".cu", ".md")
    ]
    cited = {number for path in sources for number in re.findall(r"\bContract (\d+)\b", path.read_text())}
    assert cited == {str(number) for number, _ in enumerate(CONTRACTS, 1)}
