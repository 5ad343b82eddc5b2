"""Builds the CUDA runtime that is not there, and the operators for its devices."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch
from torch.utils import cpp_extension

import gpipe_fast
from setup import find_toolkit

SOURCES = Path(__file__).parent
TOOLKIT = Path(find_toolkit()[0] or "/nowhere") / "include"


def can_build() -> bool:
    """Whether the extension was built with CUDA, and the toolkit's headers are here."""
    return gpipe_fast.built_with_cuda() and (TOOLKIT / "cuda_runtime_api.h").exists()


def build(folder: Path) -> tuple[Path, Path]:
    """The runtime, which has the driver's name too, and the operators."""
    runtime, operators = folder / "libcuda.so.1", folder / "operators.so"
    compiler = [os.environ.get("CXX", "g++"), "-O1", "-fPIC", "-shared", f"-I{TOOLKIT}"]
    own = ["-std=c++17", f"-Wl,-soname,{runtime.name}", str(SOURCES / "runtime.cpp"), "-o", str(runtime)]
    subprocess.run([*compiler, *own], check=True)
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    wheels = Path(torch.__file__).parents[1] / "nvidia" / f"cu{torch.version.cuda.split('.')[0]}" / "include"
    linked = [f"-L{path}" for path in cpp_extension.library_paths()]
    linked += ["-ltorch", "-ltorch_cpu", "-lc10", "-lc10_cuda"]
    own = [
        "-std=c++20",
        *includes,
        f"-I{wheels}",
        str(SOURCES / "operators.cpp"),
        *linked,
        "-o",
        str(operators),
    ]
    subprocess.run([*compiler, *own], check=True)
    return runtime, operators
