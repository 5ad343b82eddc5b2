"""Runs programs of this folder in subprocesses on the fake CUDA runtime."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def run(
    program: str,
    libraries: tuple[Path, Path],
    *words: str,
    limit: float = 300,
    interpreted: bool = False,
    fused: bool = False,
    **variables: object,
) -> list[str]:
    """Runs a program, and returns the lines that it prints.

    Args:
        program: The file name of the program, in this folder.
        libraries: The runtime and the operators.
        words: The program's arguments after OPERATORS.
        limit: The time limit in seconds.
        interpreted: Whether Triton interprets kernels.
        fused: Whether stages use fused kernels, whose bits differ from the plain loop's.
        variables: Variables of the fake runtime: `log` is FAKE_CUDA_LOG.
    """
    runtime, operators = libraries
    runtime_variables = {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in variables.items()}
    runtime_variables |= {"LD_PRELOAD": str(runtime), "PYTHONPATH": str(FOLDER.parents[1])}
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | runtime_variables
    environment["GPIPE_FAST_DISABLE"] = "" if fused else "fuse"
    environment["GPIPE_FAST_CACHE"] = str(FOLDER.parents[1] / "build" / "tests" / "cubins")
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-W", "ignore", str(FOLDER / program), str(operators), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.splitlines()
