"""The launchers of rotary embeddings in stages, against their patterns."""

from __future__ import annotations

import pytest

from gpipe_fast.fuse.families import rotary
from gpipe_fast.fuse.family import Case
from tests.unit.kernels.numerics.comparison import needs_kernels
from tests.unit.kernels.numerics.fused_cases import cases_of, compare_with_pattern, random_inputs

pytestmark = needs_kernels


@pytest.mark.parametrize("case", cases_of(rotary, lambda case: case.phase == 1))
def test_rotary_embeddings_equal_their_patterns(case: Case) -> None:
    compare_with_pattern(case, random_inputs(case))


@pytest.mark.parametrize("case", cases_of(rotary, lambda case: case.phase == 0))
def test_gradients_of_rotary_embeddings_equal_their_patterns(case: Case) -> None:
    compare_with_pattern(case, random_inputs(case))
