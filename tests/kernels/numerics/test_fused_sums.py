"""The fused cases of sums, and of sums in products, against their patterns."""

from __future__ import annotations

import pytest

from gpipe_fast.fuse.families import products, sums
from gpipe_fast.fuse.family import Case
from tests.kernels.numerics.comparison import needs_kernels
from tests.kernels.numerics.fused_cases import cases_of, compare_with_pattern, random_inputs

pytestmark = needs_kernels


@pytest.mark.parametrize("case", [*cases_of(sums, lambda case: True), *cases_of(products, lambda case: True)])
def test_sums_equal_their_patterns(case: Case) -> None:
    compare_with_pattern(case, random_inputs(case))
