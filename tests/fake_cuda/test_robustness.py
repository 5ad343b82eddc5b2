"""Shared pool streams, other threads and illegal accesses on the fake CUDA runtime."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_cuda import robustness_cases
from tests.fake_cuda.build import SOURCES, can_build
from tests.fake_cuda.process import run

pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
)

Libraries = tuple[Path, Path]


@pytest.mark.extended
@pytest.mark.parametrize("name", ["eight_stages_on_one_device", "a_second_thread_on_pool_streams"])
def test_stages_share_pool_streams_without_races(name: str, libraries: Libraries) -> None:
    assert run("robustness_cases.py", libraries, name, defer=1) == [name]


@pytest.mark.extended
def test_fused_addmm_has_the_same_bits_when_work_is_deferred(libraries: Libraries) -> None:
    """Immediate and deferred work give equal bits, which differ from those of deterministic mode."""
    at_once = run("robustness_cases.py", libraries, "fused_addmm_digests")
    assert at_once[0] != at_once[1], "the test shows nothing: fused addmm gave equal bits"
    assert run("robustness_cases.py", libraries, "fused_addmm_digests", defer=1) == at_once


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(function.__name__, marks=pytest.mark.soak if "capturing" in function.__name__ else ())
        for function in robustness_cases.ILLEGAL_ACCESSES
    ],
)
@pytest.mark.extended
def test_illegal_accesses_raise_and_nothing_hangs(name: str, libraries: Libraries) -> None:
    """Steps raise; or PyTorch terminates the process, since its allocator throws when a tensor is freed."""
    runtime, operators = libraries
    variables = {"LD_PRELOAD": str(runtime), "PYTHONPATH": str(SOURCES.parents[1]), "FAKE_CUDA_DEFER": "1"}
    command = [sys.executable, str(SOURCES / "robustness_cases.py"), str(operators), name]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{name}\n" or "illegal memory access" in done.stderr, done.stderr[-3000:]
