"""Builds the C++ tests of what needs no torch, with sanitizers, and runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "tests" / "cpp").glob("test_*.cpp"))
FLAGS = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Icsrc"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_under_address_and_undefined_behaviour_sanitizers(source: Path, tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    binary = tmp_path / source.stem
    subprocess.run([compiler, *FLAGS, *SANITIZERS, str(source), "-o", str(binary)], cwd=ROOT, check=True)
    done = subprocess.run([str(binary)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 failed" in done.stdout
