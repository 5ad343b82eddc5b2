"""The launchers of RMSNorm and rotary embeddings in stages, against their patterns."""

from __future__ import annotations

from typing import Any

import pytest

from gpipe_fast.fuse.families import rms_norms, rotary
from gpipe_fast.fuse.family import Case
from tests.kernels.numerics.comparison import needs_kernels
from tests.kernels.numerics.fused_cases import cases_of, compare_with_pattern, random_inputs

pytestmark = needs_kernels


def every_case(family: Any, phase: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases_of(family, lambda case: case.phase == phase))


@every_case(rms_norms, phase=1)
def test_rms_norms_equal_their_patterns(case: Case) -> None:
    compare_with_pattern(case, random_inputs(case))


@every_case(rms_norms, phase=0)
def test_gradients_of_rms_norms_equal_their_patterns(case: Case) -> None:
    compare_with_pattern(case, random_inputs(case))


@every_case(rotary, phase=1)
def test_rotary_embeddings_equal_their_patterns(case: Case) -> None:
    compare_with_pattern(case, random_inputs(case))


@every_case(rotary, phase=0)
def test_gradients_of_rotary_embeddings_equal_their_patterns(case: Case) -> None:
    compare_with_pattern(case, random_inputs(case))
