"""Builds the fake CUDA runtime, and the operators for its devices."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch
from torch.utils import cpp_extension

import gpipe_fast
from setup import find_toolkit
from tests.cached_build import cached_build

SOURCES = Path(__file__).parent
RUNTIME, OPERATORS = "libcuda.so.1", "operators.so"
TOOLKIT = Path(find_toolkit()[0] or "/nowhere") / "include"


def can_build() -> bool:
    """Returns whether the extension was built with CUDA, and the toolkit's headers are installed."""
    return gpipe_fast.built_with_cuda() and (TOOLKIT / "cuda_runtime_api.h").exists()


def build() -> tuple[Path, Path]:
    """Returns the libraries of the runtime, which also has the driver's soname, and of the operators."""
    compiler = [os.environ.get("CXX", "g++"), "-O1", "-fPIC", "-shared", f"-I{TOOLKIT}"]
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    wheels = Path(torch.__file__).parents[1] / "nvidia" / f"cu{torch.version.cuda.split('.')[0]}" / "include"
    linked = [f"-L{path}" for path in cpp_extension.library_paths()]
    linked += ["-ltorch", "-ltorch_cpu", "-lc10", "-lc10_cuda"]
    runtime = [*compiler, "-std=c++17", "-pthread", f"-Wl,-soname,{RUNTIME}"]
    runtime += map(str, sorted((SOURCES / "runtime").glob("*.cpp")))
    operators = [*compiler, "-std=c++20", *includes, f"-I{wheels}"]
    operators += [*map(str, sorted((SOURCES / "operators").glob("*.cpp"))), *linked]
    return (
        _compile("fake_cuda_runtime", SOURCES / "runtime", runtime, RUNTIME),
        _compile("fake_cuda_operators", SOURCES / "operators", operators, OPERATORS),
    )


def _compile(name: str, sources: Path, command: list[str], library: str) -> Path:
    def compile_into(folder: Path) -> None:
        subprocess.run([*command, "-o", str(folder / library)], check=True)

    return cached_build(name, [sources], [*command, torch.__version__], compile_into) / library
