"""`python -m bench NAME ...` makes tables: measures, prints and writes them to bench/results.

A benchmark's arguments follow its name: `python -m bench cuda gpt-8`. `pytest bench` measures with
pytest-benchmark instead.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent

# The modules that make tables, by name; words in names are joined by hyphens.
_OF_PACKAGES = {
    "bench.micro": "denoising draws engine execution first-call inference-stream interpreted planted "
    "schedules signature",
    "bench.compare": "distributed frontier memory overhead step tensor-parallel training-step within-memory",
    "bench.gpu": "cuda",
    "tools": "census explain fusion ledger meshes policies reruns",
}
_MODULES = {
    name: f"{package}.{name.replace('-', '_')}"
    for package, names in _OF_PACKAGES.items()
    for name in names.split()
}
BENCHMARKS = {name: module for name, module in _MODULES.items() if module.startswith("bench")}
TOOLS = {name: module for name, module in _MODULES.items() if module.startswith("tools")}


def summary(module: str) -> str:
    """Returns the first line of a module's docstring without importing the module."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or ""
    return text.partition("\n")[0]


def run(modules: Mapping[str, str], words: Sequence[str]) -> None:
    """Runs the modules whose names begin a command line; one alone may be followed by its arguments."""
    names = list(itertools.takewhile(_MODULES.__contains__, words))
    arguments = words[len(names) :]
    if not names or (arguments and len(names) > 1):
        listed = "\n".join(f"{name:18}{summary(module)}" for name, module in modules.items())
        wrong = f"unknown name: {arguments[0]}\n" if arguments and not arguments[0].startswith("-") else ""
        sys.exit(f"{wrong}usage: NAME ..., or NAME and its arguments; the names are\n{indent(listed, '  ')}")
    for name in names:
        print(f"bench: {name}: {summary(_MODULES[name])}", file=sys.stderr, flush=True)
        main = importlib.import_module(_MODULES[name]).main
        if (main(arguments) if arguments else main()) is False:
            sys.exit(1)


if __name__ == "__main__":
    run(BENCHMARKS, sys.argv[1:])
