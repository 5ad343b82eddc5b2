"""Triton kernels on the fake CUDA runtime, which runs them in Triton's interpreter."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import HAS_TRITON
from tests.fake_cuda import bfloat16, pairwise
from tests.fake_cuda.build import can_build
from tests.fake_cuda.process import run
from tests.fake_cuda.race_detector import check, read

needs_runtime = pytest.mark.skipif(
    not (can_build() and HAS_TRITON),
    reason="needs an extension built with CUDA, the toolkit's headers and Triton",
)
CASES = "one_stream/two_streams/two_threads/captured/bf16"

Libraries = tuple[Path, Path]


@needs_runtime
def test_launched_kernels_compute_without_races(libraries: Libraries, tmp_path: Path) -> None:
    words = f"limits/loading_in_a_capture/{CASES}"
    assert run("kernel_cases.py", libraries, words, interpreted=True, log=tmp_path / "log") == ["equal"]
    lines = read(tmp_path / "log")
    assert check(lines, may_wait=True) == []
    assert {line.words[1:] for line in lines if line.kind == "kernel"} >= {
        ("scale", "run"),
        ("add_in_place", "run"),
    }


@needs_runtime
@pytest.mark.extended
def test_deferred_kernels_compute(libraries: Libraries) -> None:
    assert run("kernel_cases.py", libraries, f"{CASES}/missing_wait", interpreted=True, defer=1) == ["equal"]


@needs_runtime
def test_a_missing_wait_between_kernels_is_a_race(libraries: Libraries, tmp_path: Path) -> None:
    assert run("kernel_cases.py", libraries, "missing_wait", interpreted=True, log=tmp_path / "log") == [
        "equal"
    ]
    races = check(read(tmp_path / "log"), may_wait=True)
    assert races
    assert all(race.startswith("race: ") and ": read " in race and ": write " in race for race in races)


@needs_runtime
@pytest.mark.extended
def test_a_failing_kernel_fails_the_process(libraries: Libraries) -> None:
    with pytest.raises(AssertionError, match=r"inline_asm not supported[^$]*1 kernel launches failed"):
        run("kernel_cases.py", libraries, "failing", interpreted=True)


@needs_runtime
@pytest.mark.extended
def test_every_family_matches_pytorch(libraries: Libraries) -> None:
    assert run("kernel_cases.py", libraries, "families", interpreted=True) == ["equal"]


@needs_runtime
@pytest.mark.extended
def test_every_family_matches_pytorch_with_deferred_work(libraries: Libraries) -> None:
    assert run("kernel_cases.py", libraries, "families", interpreted=True, defer=1) == ["equal"]


def test_rounding_to_bf16_has_the_bits_of_pytorch() -> None:
    """Every sign, exponent and upper significand, with the lower bits around a tie."""
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    wide = (upper[:, None] | lower).view(np.float32)
    expected = torch.from_numpy(wide).bfloat16()
    found = torch.from_numpy(bfloat16.round_to_bf16(wide)).view(torch.bfloat16)
    same = found.view(torch.int16) == expected.view(torch.int16)
    assert (same | (found.isnan() & expected.isnan())).all()
    widened = torch.from_numpy(bfloat16.widen(found.view(torch.uint16).numpy()))
    assert torch.equal(widened.nan_to_num(7), found.float().nan_to_num(7))


def test_truncation_to_bf16_drops_the_lower_bits() -> None:
    for wide in (1.0, -1.0078124, 3.4e38, 1e-40, float("inf")):
        (bits,) = struct.unpack("<I", struct.pack("<f", wide))
        assert bfloat16.truncate_to_bf16(np.array([wide], np.float32))[0] == bits >> 16
    assert bfloat16.truncate_to_bf16(np.array([np.nan], np.float32))[0] == bfloat16.CANONICAL_NAN


def test_sums_in_pairs_round_less_than_sums_in_order() -> None:
    values = np.random.default_rng(0).standard_normal((1000, 64)).astype(np.float32)
    for given in (values, values.T, values[:, None]):
        axis = given.shape.index(1000)
        exact = given.sum(axis, dtype=np.float64)
        found = pairwise.sum_in_pairs(given, axis)
        assert found.dtype == np.float32
        assert found.shape == exact.shape
        assert np.abs(found - exact).max() < 1e-5
    in_order = np.abs(values.cumsum(0)[-1] - values.sum(0, dtype=np.float64)).max()
    assert np.abs(pairwise.sum_in_pairs(values, 0) - values.sum(0, dtype=np.float64)).max() < in_order / 3
