"""Maps call sites, which the fake runtime logs as offsets in the extension, to lines of csrc/.

The extension has no line numbers. The sources that contain stream waits are therefore compiled again with
line numbers, into a separate library; each function has the same code there, as its size confirms.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from gpipe_fast import _C
from setup import build_arguments
from tests.cached_build import ROOT, cached_build
from tests.fake_cuda.build import TOOLKIT

EXTENSION = Path(_C.__file__)
# Functions that end with a wait, or a call of such a function: a tail call, so the frame is the caller's.
AWAIT = "stream.wait(event)"
TAIL_CALLED = {"receive": AWAIT, "await": AWAIT, "keep_until": "in_.wait(event)"}
WAIT = re.compile(r"\.wait\(")


class Function(NamedTuple):
    """A function's address range in a library."""

    begin: int
    size: int
    name: str


def waits_in_source() -> list[str]:
    """Returns the stream waits in csrc/ as file:line."""
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "csrc").rglob("*"))
        if path.suffix in {".cpp", ".h"} and path.parent.name != "engine"  # where threads wait, not streams
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if WAIT.search(line)
    ]


def functions_of(library: Path) -> list[Function]:
    """Returns the functions of a library, by address."""
    listed = subprocess.run(
        ["nm", "--defined-only", "--print-size", str(library)], check=True, capture_output=True, text=True
    )
    rows = [line.split() for line in listed.stdout.splitlines()]
    code = [row for row in rows if len(row) == 4 and row[2] in "tTwW"]
    return sorted(Function(int(begin, 16), int(size, 16), name) for begin, size, _, name in code)


def function_at(functions: Iterable[Function], address: int) -> Function:
    """Returns the function that contains an address."""
    return next(f for f in functions if f.begin <= address < f.begin + f.size)


def names_of(sites: Iterable[int]) -> dict[int, str]:
    """Returns the name of the function that contains each site, without its parameters."""
    functions = functions_of(EXTENSION)
    found = {site: function_at(functions, site - 1).name.partition(".cold")[0] for site in sites}
    plain = subprocess.run(
        ["c++filt", "--no-params", *found.values()], check=True, capture_output=True, text=True
    )
    return dict(zip(found, plain.stdout.splitlines(), strict=True))


def lines_of(sites: Iterable[int]) -> dict[int, str]:
    """Returns the line of csrc/ in which the stream waits, for each site."""
    library = _library_with_lines()
    ours, theirs = functions_of(EXTENSION), {f.name: f for f in functions_of(library)}
    found = {}
    for site in sites:
        function = function_at(ours, site - 1)
        twin = theirs[function.name]
        assert twin.size == function.size, f"{function.name} compiles to different code with line numbers"
        address = twin.begin + site - 1 - function.begin
        shown = subprocess.run(
            ["addr2line", "-i", "-e", str(library), hex(address)], check=True, capture_output=True, text=True
        )
        found[site] = _wait_in_stack(re.findall(r"(csrc/\S+?:\d+)", shown.stdout))
    return found


def _wait_in_stack(stack: list[str]) -> str:
    """Returns the innermost wait of a call stack, whose innermost frame comes first."""
    known = waits_in_source()
    for location in stack:
        if location in known:
            return location
        called = re.findall(r"(\w+)\(", _source_line(location))
        for name in set(called) & TAIL_CALLED.keys():
            return next(wait for wait in known if TAIL_CALLED[name] in _source_line(wait))
    return stack[0]


def _source_line(location: str) -> str:
    path, _, number = location.partition(":")
    return (ROOT / path).read_text().splitlines()[int(number) - 1]


def _library_with_lines() -> Path:
    (extension,) = build_arguments()["ext_modules"]
    calls = re.compile(WAIT.pattern + "".join(rf"|\b{name}\(" for name in TAIL_CALLED))
    sources = sorted((ROOT / "csrc").glob("[!e]*/*.cpp"))
    units = [path for path in sources if calls.search(path.read_text())]
    command = [os.environ.get("CXX", "c++"), *sysconfig.get_config_var("CFLAGS").split(), "-fPIC"]
    command += [f"-D{name}={value}" for name, value in extension.define_macros]
    command += [f"-I{path}" for path in [*extension.include_dirs, TOOLKIT, sysconfig.get_path("include")]]
    command += ["-g1" if flag == "-g0" else flag for flag in extension.extra_compile_args["cxx"]]
    command += ["-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=_C", "-std=c++20"]

    def compile_into(folder: Path) -> None:
        objects = []
        for unit in units:
            objects.append(str(folder / f"{unit.parent.name}_{unit.stem}.o"))
            subprocess.run([*command, "-c", str(unit), "-o", objects[-1]], check=True)
        subprocess.run([command[0], "-shared", *objects, "-o", str(folder / "lines.so")], check=True)

    options = [*command, *map(str, units)]
    return cached_build("waits", [ROOT / "csrc"], options, compile_into) / "lines.so"
