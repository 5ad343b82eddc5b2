"""`GPipe.stream` on the fake CUDA runtime: the bits of calls, and no races."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fake_cuda.fake_devices import FOUR_DEVICES, ONE_DEVICE, WITH_CPU
from tests.fake_cuda.race_detector import Line, check


@pytest.mark.parametrize(
    ("models", "devices", "words"),
    [
        ("mlp/skips/dropout", FOUR_DEVICES, ("own_streams",)),
        *(
            pytest.param(models, devices, words, marks=pytest.mark.extended)
            for models, devices, words in (
                ("several/batch norm/tied/python", FOUR_DEVICES, ()),
                ("several/batch norm/dropout/python", ONE_DEVICE, ()),
                ("several/batch norm/dropout/python", WITH_CPU, ("own_streams",)),
                ("mlp/skips", ONE_DEVICE, ("between", "own_streams")),  # such calls draw other numbers
                ("skips/dropout", FOUR_DEVICES, ("failures", "own_streams")),
                ("skips/dropout", ONE_DEVICE, ("pinned", "own_streams")),
            )
        ),
    ],
    ids=str,
)
def test_results_equal_those_of_calls_without_races(
    models: str, devices: str, words: tuple[str, ...], logged: Callable[..., list[Line]]
) -> None:
    assert check(logged("stream_cases.py", models, devices, *words, expected=["equal"], late=1)) == []
