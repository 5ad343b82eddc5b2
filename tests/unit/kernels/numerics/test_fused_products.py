"""The fused cases of sums in products, against their patterns."""

from __future__ import annotations

import pytest

from gpipe_fast.fuse.families import products
from gpipe_fast.fuse.family import Case
from tests.unit.kernels.numerics.comparison import needs_kernels
from tests.unit.kernels.numerics.fused_cases import cases_of, compare_with_pattern, random_inputs

pytestmark = needs_kernels


@pytest.mark.parametrize("case", cases_of(products, lambda case: True))
def test_products_equal_their_patterns(case: Case) -> None:
    compare_with_pattern(case, random_inputs(case))
