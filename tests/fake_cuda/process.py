"""Runs programs of this folder on the CUDA runtime that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def run(
    program: str, libraries: tuple[Path, Path], *words: str, limit: float = 300, **variables: object
) -> list[str]:
    """What it prints, by lines, in so many seconds; the runtime's variables are named in small letters."""
    runtime, operators = libraries
    runtime_variables = {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in variables.items()}
    runtime_variables |= {"LD_PRELOAD": str(runtime), "PYTHONPATH": str(FOLDER.parents[1])}
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | runtime_variables
    command = [sys.executable, "-W", "ignore", str(FOLDER / program), str(operators), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.splitlines()
