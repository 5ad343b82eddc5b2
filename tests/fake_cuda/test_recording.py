"""Recordings on GPUs have the times of the devices: of work, of waits for copies, and of copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize(
    ("nanoseconds", "variables"),
    [
        ("0", {"defer": 3}),
        ("40000", {"copy_ns": 40000}),  # a slow link is blamed
        pytest.param("0", {"peers": "0"}, marks=pytest.mark.extended),
    ],
    ids=["deferred", "slow", "pinned"],
)
def test_times_are_those_of_stream_events(
    nanoseconds: str, variables: dict[str, object], run: Callable[..., list[str]]
) -> None:
    assert run("recording_cases.py", nanoseconds, **variables) == ["right"]
