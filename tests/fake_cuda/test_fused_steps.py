"""The care that stages take of fused kernels: which steps launch them, and what happens when one fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import HAS_TRITON
from tests.fake_cuda.build import can_build
from tests.fake_cuda.process import run
from tests.fake_cuda.race_detector import check, read

pytestmark = pytest.mark.skipif(
    not (can_build() and HAS_TRITON),
    reason="needs an extension built with CUDA, the toolkit's headers and Triton",
)
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
    "a_kernel_that_does_not_load_is_left_out",
    "kernels_that_one_device_does_not_load_are_left_out",
    "a_wrong_backward_is_left_out",
    "a_wrong_kernel_in_a_captured_step",
    "without_fuse_steps_launch_none",
    "the_variable_turns_fused_kernels_off",
    "unaligned_inputs_take_the_other_form",
    "two_steps_may_be_in_flight",
    "parameters_may_be_replaced",
    "checkpoint_modes",
    "replays_have_the_bits_of_other_steps",
    "batches_without_rows",
    "recordings_name_the_kernels",
    "an_explanation_names_the_kernels_that_run",
    "the_self_test_of_doctor",
    "the_self_test_reports_large_errors",
]
# The libraries of `equal_stages_share_kernels`: two forms of six kernels.
SHARED_LIBRARIES = 12


def test_fused_steps(libraries: tuple[Path, Path], tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run("fused_step_cases.py", libraries, *CASES, interpreted=True, fused=True, log=log) == CASES
    marks = [line.words for line in read(log) if line.kind == "mark"]
    own = marks[: marks.index(("end", CASES[0]))]
    assert sum(words[0] == "library" for words in own) == SHARED_LIBRARIES


@pytest.mark.extended
@pytest.mark.parametrize("variables", [{}, {"defer": 1}], ids=["at once", "deferred"])
def test_more_fused_steps(variables: dict[str, int], libraries: tuple[Path, Path]) -> None:
    cases = [*CASES, *LONGER_CASES] if variables else LONGER_CASES
    assert run("fused_step_cases.py", libraries, *cases, interpreted=True, fused=True, **variables) == cases


@pytest.mark.extended
def test_fused_steps_have_no_races(libraries: tuple[Path, Path], tmp_path: Path) -> None:
    cases, log = ["checkpoint_modes", "replays_launch_the_kernels"], tmp_path / "log"
    assert run("fused_step_cases.py", libraries, *cases, interpreted=True, fused=True, log=log) == cases
    assert check(read(log), may_wait=True) == []
