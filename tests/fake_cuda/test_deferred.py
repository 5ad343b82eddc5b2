"""Pipelines on GPUs that are not there, whose streams hold their work as long as they may: their bits.

With FAKE_CUDA_DEFER what is put on a stream runs only when somebody waits for it, in a random order that the
streams and the events between them allow (runtime/deferred.h); so a missing wait gives wrong bits.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda.build import can_build
from tests.fake_cuda.process import run

pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
)

FOUR, ONE, MIXED = "cuda:0,cuda:1,cuda:2,cuda:3", "cuda:1,cuda:1,cuda:1,cuda:1", "cuda:0,cpu,cuda:0,cuda:1"
CAPTURED = "mlp/skips/several/batch norm/dropout/tied/convolutions"
ALL_MODELS = f"{CAPTURED}/python/convolutions, channels last"
CASES_OF_SCHEDULES, MANY_CASES, AT_ONCE = 20, 1000, 200

Libraries = tuple[Path, Path]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [FOUR, ONE, MIXED], ids=["four", "one", "mixed"])
def test_models(devices: str, libraries: Libraries) -> None:
    models = "skips/batch norm/python"
    assert run("program.py", libraries, models, devices, "never", "except_last", defer=1) == ["equal"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [FOUR, ONE], ids=["four", "one"])
def test_captured_models(devices: str, libraries: Libraries) -> None:
    words = ("skips/dropout", devices, "captured", "except_last")
    assert run("program.py", libraries, *words, defer=2) == ["equal"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("word", ["aside", "disturbed", "pinned"])
def test_callers_failures_and_transports(word: str, libraries: Libraries) -> None:
    words = ("small/large" if word == "pinned" else "small", FOUR, word, "except_last")
    assert run("program.py", libraries, *words, defer=3, late=1) == ["equal"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("captured", [False, True], ids=["as it is", "captured"])
@pytest.mark.parametrize("devices", [FOUR, ONE, MIXED], ids=["four", "one", "mixed"])
def test_all_models(devices: str, captured: bool, seed: int, libraries: Libraries) -> None:
    if captured and devices == MIXED:
        pytest.skip("a stage on the CPU is not captured")
    words = ["never", "except_last", "always", *(["captured"] if captured else [])]
    models = CAPTURED if captured else ALL_MODELS
    assert run("program.py", libraries, models, devices, *words, defer=seed) == ["equal"]


def test_random_schedules(libraries: Libraries) -> None:
    assert run("schedules.py", libraries, "0", str(CASES_OF_SCHEDULES), defer=4, late=2) == ["equal"]


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, MANY_CASES, AT_ONCE))
def test_many_random_schedules(first: int, libraries: Libraries) -> None:
    assert run("schedules.py", libraries, str(first), str(AT_ONCE), defer=first + 1) == ["equal"]
