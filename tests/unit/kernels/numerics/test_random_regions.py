"""Generated kernels of random graphs, compared with PyTorch's operators."""

from __future__ import annotations

import pytest

from tests.unit.kernels.numerics.comparison import DEVICE, needs_kernels
from tests.unit.kernels.numerics.fused_graphs import compare, operators_of, trace
from tests.unit.kernels.numerics.random_graphs import RandomFunction

pytestmark = needs_kernels

NUM_GRAPHS, CHUNK = 200, 10
# The share of operators that kernels compute, at least.
FUSED_SHARE = 0.6


@pytest.mark.parametrize("first", range(0, NUM_GRAPHS, CHUNK))
def test_random_graphs(first: int) -> None:
    before, after = 0, 0
    for seed in range(first, first + CHUNK):
        function = RandomFunction(seed)
        inputs = [t.to(DEVICE) for t in function.inputs]
        compared = trace(function, inputs, gradients=seed % 2 == 0, recompute=seed % 4 == 0)
        try:
            compare(compared, inputs)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        before += len(operators_of(compared.plain))
        after += len(compared.left())
    assert before - after >= FUSED_SHARE * before
