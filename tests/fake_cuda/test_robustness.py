"""Illegal accesses on the fake CUDA runtime."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fake_cuda.fake_devices import FOUR_DEVICES

ONE_DEVICE = "cuda:0,cuda:0,cuda:0,cuda:0"
# Devices, transport, steps before the fault, and the operations that fail, with their stride in each tier.
ILLEGAL_ACCESSES = {
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
def test_illegal_accesses_raise_and_nothing_aborts(
    case: str, tier: int, run: Callable[..., list[str]]
) -> None:
    *words, strides = ILLEGAL_ACCESSES[case]
    found = run("illegal_accesses.py", *words, strides[tier], limit=1800, defer=tier)
    assert found == ["done"]
