"""The tests of `make gpu`: a crash or an unusable device costs one test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TESTS = """
import os
import pytest
import torch

pytestmark = pytest.mark.smoke

def test_wrong():
    assert "one" == "another"

def test_crash():
    os.abort()

def test_unusable(monkeypatch):
    def fail(): raise RuntimeError("illegal memory access")
    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = fail
    fail()

@pytest.mark.parametrize("name", ["a b", "c"])
def test_usable(name):
    assert not torch.cuda.is_initialized()
"""
# Without the time limit of a test, which a busy machine may exceed.
WITHOUT_LIMIT = """
import functools, sys
from tools.on_gpu import tests
tests.run_cases = functools.partial(tests.run_cases, case_seconds=600.0)
tests.main(sys.argv[1:])
"""


@pytest.mark.extended
def test_a_crash_or_an_unusable_device_costs_one_test(tmp_path: Path) -> None:
    (tmp_path / "test_these.py").write_text(TESTS)
    (tmp_path / "test_broken.py").write_text("import no_such_module")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIMIT, "test_broken.py", "test_these.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stdout
    assert lines[-1] == "2 passed, 3 failed, 0 skipped, 0 not run", done.stdout
    for text in ("No module named 'no_such_module'", "AssertionError: assert 'one' == 'another'", "Aborted"):
        assert text in done.stdout, text
    assert any(
        line.startswith("test_these.py::test_crash: FAILED: its process exited with -6") for line in lines
    )
