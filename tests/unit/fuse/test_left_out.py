"""Kernels that are left out: their reasons, and one warning for each kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from gpipe_fast.fuse import left_out
from gpipe_fast.lower.launch import KernelLaunch
from tests.unit.fuse.triton_kernels import double, not_specialized


def launch_of(kernel: object, divisible: tuple[str, ...] = ()) -> KernelLaunch:
    return KernelLaunch(
        kernel=kernel, signature=(("p_x", "*fp32"), ("p_y", "*fp32"), ("size", "i32")),
        constants=(("BLOCK", 32),), divisible=divisible, grid=(2, 1, 1), num_warps=2, num_stages=3,
        outputs=(1,), aligned=(0, 1),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_left_out() -> Iterator[None]:
    left_out.forget()
    yield
    left_out.forget()


def test_specializations_are_left_out_one_by_one_after_one_warning() -> None:
    first, second = launch_of(double), launch_of(double, ("size",))
    left_out.leave_out(first, "wrong results")
    assert left_out.reason_of(first) == "wrong results"
    assert left_out.reason_of(second) is None
    left_out.leave_out(second, "does not compile")
    assert left_out.number_left_out() == 2
    (warning,) = left_out.pending
    assert "the fused kernel triton_kernels.double is left out" in warning
    assert "compute instead: wrong results; please report" in warning


def test_the_first_reason_is_kept() -> None:
    launch = launch_of(double)
    left_out.leave_out(launch, "first")
    left_out.leave_out(dataclasses.replace(launch, grid=(7, 1, 1)), "second")
    assert left_out.reason_of(launch) == "first"
    assert left_out.number_left_out() == 1


def test_names_are_sorted_and_forgotten() -> None:
    for kernel in (not_specialized, double):
        left_out.leave_out(launch_of(kernel), "wrong")
    assert left_out.names() == ["triton_kernels.double", "triton_kernels.not_specialized"]
    left_out.forget()
    assert (left_out.names(), left_out.number_left_out(), left_out.pending) == ([], 0, [])
