"""Builds and runs the C++ tests of the torch-free code, with sanitizers."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cached_build import ROOT, cached_build

FLAGS = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Icsrc", "-pthread"]
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "thread": ["-fsanitize=thread"],
}


@dataclass(frozen=True)
class CppProgram:
    """The csrc sources that a test program is linked with, and the sanitizers that it runs under."""

    sources: tuple[str, ...] = ()
    sanitizers: tuple[str, ...] = ("address",)


PROGRAMS = {
    "test_cores": CppProgram(("engine/cores.cpp",)),
    "test_engine": CppProgram(
        ("engine/engine.cpp", "engine/actions.cpp", "engine/cores.cpp"), ("address", "thread")
    ),
    "test_random": CppProgram(),
}


def build(name: str, sanitizer: str) -> Path:
    """Returns the binary of a test program, built if necessary."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    sources = [f"tests/cpp/{name}.cpp", *(f"csrc/{source}" for source in PROGRAMS[name].sources)]
    command = [compiler, *FLAGS, *SANITIZERS[sanitizer], *sources]
    read = [ROOT / "tests" / "cpp", *(ROOT / "csrc" / folder for folder in ("engine", "random", "check.h"))]

    def compile_into(folder: Path) -> None:
        subprocess.run([*command, "-o", str(folder / name)], cwd=ROOT, check=True)

    return cached_build(f"{name}-{sanitizer}", read, command, compile_into) / name


@functools.cache
def without_address_randomization() -> tuple[str, ...]:
    """Returns a command prefix without address randomization, which ThreadSanitizer needs on some kernels."""
    prefix = ("setarch", "-R")
    if shutil.which("setarch") is None:
        return ()
    unsupported = subprocess.run([*prefix, "true"], capture_output=True).returncode  # by some containers
    return () if unsupported else prefix


def run(binary: Path, *arguments: str, timeout: float) -> None:
    command = [*without_address_randomization(), str(binary), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    assert "0 failed" in done.stdout


@pytest.mark.parametrize(
    ("name", "sanitizer"), [(name, s) for name, program in PROGRAMS.items() for s in program.sanitizers]
)
def test_program_passes_under_sanitizer(name: str, sanitizer: str) -> None:
    run(build(name, sanitizer), "25", timeout=300)  # rounds of random schedules


@pytest.mark.soak
@pytest.mark.parametrize("sanitizer", PROGRAMS["test_engine"].sanitizers)
def test_engine_passes_many_random_schedules(sanitizer: str) -> None:
    run(build("test_engine", sanitizer), "10000", "1", timeout=1800)
