"""The commands in the README, guides and pages exist: targets, benchmarks, modules, files, torch versions."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from importlib.metadata import entry_points

from bench.__main__ import BENCHMARKS, TOOLS
from tests.docs.markdown import CONSOLE, FENCE, ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"^([A-Z_]+) \?=", MAKEFILE, re.MULTILINE))
# Programs other than make, python and pip that a reader may be told to run.
PROGRAMS = {entry.name for entry in entry_points(group="console_scripts")} | {"git", "cd", "export"}


def commands_of(text: str) -> Iterator[str]:
    """Yields the lines of console blocks after the prompt, and code spans that begin as a command does."""
    for block in CONSOLE.findall(text):
        yield from re.findall(r"^\$ (.+)$", block, re.MULTILINE)
    yield from re.findall(r"`((?:make|python -m|pip install)(?: [^`\n]+)?)`", FENCE.sub("", text))


def problems_of(command: str) -> list[str]:
    """Returns what a command names that does not exist."""
    program, *arguments = shlex.split(command, comments=True)
    program = program.removeprefix(".venv/bin/")
    if program == "make":
        return _problems_of_make(arguments)
    if program in ("python", "python3") and arguments[:1] == ["-m"]:
        return _problems_of_module(*arguments[1:])
    if program == "pip":
        return _problems_of_pip(arguments)
    return [] if program in PROGRAMS | {"python", "python3"} else [f"unknown program {program}"]


def _problems_of_make(arguments: list[str]) -> list[str]:
    problems = []
    settings = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    targets = [argument for argument in arguments if "=" not in argument]
    problems += [f"no target {target}" for target in targets if target not in TARGETS]
    problems += [f"no variable {name}" for name in settings if name not in VARIABLES]
    names = settings.get("ARGS", "").split()
    if targets == ["bench"]:
        problems += [f"no benchmark {name}" for name in names if name not in BENCHMARKS]
    problems += [f"no file {name}" for name in names if "/" in name and not _exists(name)]
    return problems


def _problems_of_module(module: str, *arguments: str) -> list[str]:
    problems = [] if importlib.util.find_spec(module) else [f"no module {module}"]
    if known := {"bench": BENCHMARKS, "tools": TOOLS}.get(module):
        problems += [f"no name {name}" for name in arguments[:1] if name not in known]
    return problems + [f"no file {name}" for name in arguments if "/" in name and not _exists(name)]


def _problems_of_pip(arguments: list[str]) -> list[str]:
    required = re.search(r'"(torch>=[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert required is not None
    versions = [set(a[5:].split(",")) for a in arguments if re.match(r"torch\b", a)]
    return [] if all(v == set(required[1][5:].split(",")) for v in versions) else [f"not {required[1]}"]


def _exists(name: str) -> bool:
    return (ROOT / name.partition("::")[0]).exists()


def test_the_commands_of_the_pages_exist() -> None:
    commands = {command for page in PAGES for command in commands_of(page.read_text())}
    assert len(commands) > 50
    problems = {command: problems_of(command) for command in sorted(commands)}
    assert {command: found for command, found in problems.items() if found} == {}
