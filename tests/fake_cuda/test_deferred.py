"""Bits of pipelines on the fake CUDA runtime with deferred work.

With FAKE_CUDA_DEFER, a stream's work runs only when a caller waits for it, in a random order that streams and
events allow (runtime/deferred.h), so a missing wait gives wrong bits.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda.build import can_build
from tests.fake_cuda.process import run

pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
)

FOUR_DEVICES, ONE_DEVICE, WITH_CPU = (
    "cuda:0,cuda:1,cuda:2,cuda:3",
    "cuda:1,cuda:1,cuda:1,cuda:1",
    "cuda:0,cpu,cuda:0,cuda:1",
)
CAPTURED = "mlp/skips/several/batch norm/dropout/tied/convolutions"
ALL_MODELS = f"{CAPTURED}/python/convolutions, channels last"
NUM_CASES, NUM_LONGER_CASES, NUM_SOAK_CASES, CASES_PER_TEST = 5, 20, 1000, 200

Libraries = tuple[Path, Path]


@pytest.mark.extended
@pytest.mark.parametrize("devices", [FOUR_DEVICES, ONE_DEVICE, WITH_CPU], ids=["four", "one", "mixed"])
def test_models_equal_the_plain_loop(devices: str, libraries: Libraries) -> None:
    models = "skips/batch norm/python"
    assert run("train_models.py", libraries, models, devices, "never", "except_last", defer=1) == ["equal"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [FOUR_DEVICES, ONE_DEVICE], ids=["four", "one"])
def test_captured_models_equal_the_plain_loop(devices: str, libraries: Libraries) -> None:
    words = ("skips/dropout", devices, "captured", "except_last")
    assert run("train_models.py", libraries, *words, defer=2) == ["equal"]


@pytest.mark.extended
@pytest.mark.parametrize("word", ["own_streams", "failures", "pinned"])
def test_caller_streams_failing_steps_and_pinned_transport_keep_bits(word: str, libraries: Libraries) -> None:
    words = ("small/large" if word == "pinned" else "small", FOUR_DEVICES, word, "except_last")
    assert run("train_models.py", libraries, *words, defer=3, late=1) == ["equal"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("captured", [False, True], ids=["uncaptured", "captured"])
@pytest.mark.parametrize("devices", [FOUR_DEVICES, ONE_DEVICE, WITH_CPU], ids=["four", "one", "mixed"])
def test_all_models_equal_the_plain_loop(
    devices: str, captured: bool, seed: int, libraries: Libraries
) -> None:
    if captured and devices == WITH_CPU:
        pytest.skip("a stage on the CPU is not captured")
    words = ["never", "except_last", "always", *(["captured"] if captured else [])]
    models = CAPTURED if captured else ALL_MODELS
    assert run("train_models.py", libraries, models, devices, *words, defer=seed) == ["equal"]


@pytest.mark.parametrize("count", [NUM_CASES, pytest.param(NUM_LONGER_CASES, marks=pytest.mark.extended)])
def test_random_schedules_equal_the_plain_loop(count: int, libraries: Libraries) -> None:
    assert run("train_random_schedules.py", libraries, "0", str(count), defer=4, late=2) == ["equal"]


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, NUM_SOAK_CASES, CASES_PER_TEST))
def test_many_random_schedules_equal_the_plain_loop(first: int, libraries: Libraries) -> None:
    assert run("train_random_schedules.py", libraries, str(first), str(CASES_PER_TEST), defer=first + 1) == [
        "equal"
    ]
