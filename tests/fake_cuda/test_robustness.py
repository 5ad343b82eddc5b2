"""Shared pool streams, other threads and illegal accesses on the fake CUDA runtime."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda.build import can_build
from tests.fake_cuda.process import run

pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
)

Libraries = tuple[Path, Path]


@pytest.mark.extended
@pytest.mark.parametrize("name", ["eight_stages_on_one_device", "a_second_thread_on_pool_streams"])
def test_stages_share_pool_streams_without_races(name: str, libraries: Libraries) -> None:
    assert run("robustness_cases.py", libraries, name, defer=1) == [name]


def test_pytorchs_warning_about_streams_is_off(libraries: Libraries) -> None:
    name = "streams_of_one_device_warn_of_nothing"
    assert run("robustness_cases.py", libraries, name) == [name]


@pytest.mark.extended
def test_fused_addmm_has_the_same_bits_when_work_is_deferred(libraries: Libraries) -> None:
    """Immediate and deferred work give equal bits, which differ from those of deterministic mode."""
    at_once = run("robustness_cases.py", libraries, "fused_addmm_digests")
    assert at_once[0] != at_once[1], "the test shows nothing: fused addmm gave equal bits"
    assert run("robustness_cases.py", libraries, "fused_addmm_digests", defer=1) == at_once


FOUR_DEVICES, ONE_DEVICE = "cuda:0,cuda:1,cuda:2,cuda:3", "cuda:0,cuda:0,cuda:0,cuda:0"
# Devices, transport, steps before the fault, and the operations that fail, with their stride in each tier.
ILLEGAL_ACCESSES = {
    "uncaptured": (FOUR_DEVICES, "auto", "1", "15", "400", ("60", "3")),
    "one_device": (ONE_DEVICE, "auto", "1", "15", "200", ("60", "3")),
    "peer": (FOUR_DEVICES, "peer", "1", "15", "400", ("60", "3")),
    "pinned": (FOUR_DEVICES, "pinned", "1", "15", "400", ("60", "3")),
    "capturing": (FOUR_DEVICES, "auto", "2", "15", "200", ("60", "3")),
    "replayed": (FOUR_DEVICES, "auto", "4", "0", "3", ("1", "1")),
}


@pytest.mark.parametrize("case", ILLEGAL_ACCESSES)
@pytest.mark.parametrize(
    "tier",
    [
        pytest.param(0, marks=pytest.mark.extended, id="some"),
        pytest.param(1, marks=pytest.mark.soak, id="many"),
    ],
)
def test_illegal_accesses_raise_and_nothing_aborts(case: str, tier: int, libraries: Libraries) -> None:
    *words, strides = ILLEGAL_ACCESSES[case]
    found = run("illegal_accesses.py", libraries, *words, strides[tier], limit=1800, defer=tier)
    assert found == ["done"]
