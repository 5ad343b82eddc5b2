"""The care that stages take of fused kernels: which steps launch them, and what happens when one fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import HAS_TRITON
from tests.fake_cuda.race_detector import Line, check

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
CASES = [
    "equal_stages_share_kernels",  # first: libraries stay loaded
    "a_kernel_that_does_not_compile_is_left_out",
    "a_wrong_forward_is_left_out",
    "deterministic_steps_launch_none",
    "fuse_may_be_set_between_calls",
    "replays_launch_the_kernels",
    "the_self_test_reports_a_wrong_kernel",
]
LONGER_CASES = [
    "kernels_that_do_not_load_are_left_out",
    "unaligned_inputs_take_the_other_form",
    "two_steps_may_be_in_flight",
    "batches_without_rows",
    "recordings_name_the_kernels",
    "the_self_test_of_doctor",
]
RACE_CASES = ["checkpoint_modes", "replays_launch_the_kernels"]
# The libraries of `equal_stages_share_kernels`: two forms of six kernels.
SHARED_LIBRARIES = 12
FUSED = {"interpreted": True, "fused": True}

Logged = Callable[..., list[Line]]


def test_fused_steps(logged: Logged) -> None:
    lines = logged("fused_step_cases.py", *CASES, expected=CASES, **FUSED)
    marks = [line.words for line in lines if line.kind == "mark"]
    own = marks[: marks.index(("end", CASES[0]))]
    assert sum(words[0] == "library" for words in own) == SHARED_LIBRARIES


@pytest.mark.extended
def test_more_fused_steps_with_deferred_work(run: Callable[..., list[str]]) -> None:
    cases = [*LONGER_CASES, *RACE_CASES, "a_wrong_kernel_in_a_captured_step"]  # its kernel stays wrong
    assert run("fused_step_cases.py", *cases, defer=1, **FUSED) == cases


@pytest.mark.extended
def test_fused_steps_have_no_races(logged: Logged) -> None:
    lines = logged("fused_step_cases.py", *RACE_CASES, expected=RACE_CASES, **FUSED)
    assert check(lines, may_wait=True) == []
