"""Runs the tests that need a GPU on the fake CUDA runtime, so that they stay correct without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "chosen",
    [
        "(test_an_optimizer_step and not uncaptured) or (test_training and mlp and except_last and mixed)",
        pytest.param(
            "(test_cuda_steps and not uncaptured) or (test_forced and pinned and mlp) "
            "or (test_training and except_last and several and (skips or python))",
            marks=pytest.mark.extended,
        ),
        pytest.param("test_cuda", marks=pytest.mark.soak),
    ],
    ids=["few", "sample", "all"],
)
def test_gpu_tests_pass_on_the_fake_runtime(chosen: str, libraries: tuple[Path, Path]) -> None:
    runtime, operators = libraries
    variables = {
        "LD_PRELOAD": str(runtime),
        "FAKE_CUDA_LOG": os.devnull,
        "FAKE_CUDA_OPERATORS": str(operators),
        "PYTHONPATH": str(ROOT),
        "GPIPE_FAST_DISABLE": "fuse",
    }
    options = ["-q", "--tb=short", "-p", "tests.fake_cuda.plugin", "-p", "no:cacheprovider", "-m", "cuda"]
    command = [sys.executable, "-m", "pytest", *options, "-k", chosen]
    command += [
        "tests/contracts/contract_1_same_bits/test_cuda.py",
        "tests/contracts/contract_1_same_bits/test_cuda_steps.py",
    ]
    done = subprocess.run(
        command, env=os.environ | variables, cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
