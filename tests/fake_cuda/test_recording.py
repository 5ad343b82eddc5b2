"""Recordings on GPUs have the times of the devices: of work, of waits for copies, and of copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda.build import can_build
from tests.fake_cuda.process import run

pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
)


@pytest.mark.parametrize(
    "variables",
    [
        *(pytest.param(v, marks=pytest.mark.extended) for v in ({}, {"peers": "0"})),
        {"defer": 3},
    ],
    ids=["peer", "pinned", "deferred"],
)
def test_times_are_those_of_stream_events(libraries: tuple[Path, Path], variables: dict[str, object]) -> None:
    assert run("recording_cases.py", libraries, "0", **variables) == ["right"]


def test_a_slow_link_is_blamed(libraries: tuple[Path, Path]) -> None:
    assert run("recording_cases.py", libraries, "40000", copy_ns=40000) == ["right"]
