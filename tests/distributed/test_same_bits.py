"""A pipeline over several processes equals the plain loop and the pipeline in one process, bit for bit."""

from __future__ import annotations

import pytest

from tests.distributed import cases
from tests.distributed.launch import needs_gloo, run_ranks

pytestmark = needs_gloo

# Ranks, models, schedules, numbers of micro-batches, checkpoint modes, numbers of stages and of samples. With
# eleven samples in 2, 3, 4 or 5 micro-batches, the last is smaller.
CASES = {
    "smaller last micro-batch": (2, ["batch norm"], ["gpipe"], [5], ["except_last"], 2, 11),
    "skips beyond neighbours, and pairs": (3, ["skips", "tuples"], ["zb-h1"], [4], ["except_last"], 3, 12),
    "quantized weights": (2, ["quantized"], ["gpipe"], [4], ["except_last"], 2, 11),
    "stages in turn": (2, ["ties"], ["interleaved"], [4], ["except_last"], 4, 12),
}
SCHEDULES, BOUNDARIES = ["gpipe", "1f1b", "zb-h1"], ["tuples", "skips", "dropout", "ties"]
TURNS = ["batch norm", "tuples", "skips", "ties", "dropout"], ["interleaved", "1f1b", "gpipe"]
LONGER_CASES = {
    "checkpoints": (2, ["batch norm"], ["gpipe"], [1, 2, 5], ["always", "never"], 2, 11),
    **{f"schedules of {n}": (n, ["gpt"], SCHEDULES, [4], ["except_last"], n, 11) for n in (3, 4)},
    "boundaries": (3, BOUNDARIES, ["gpipe", "1f1b"], [5], ["except_last"], 3, 11),
    "all models in turn": (2, *TURNS, [4], ["except_last"], 4, 11),
}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.extended) for name, case in LONGER_CASES.items()),
    ],
)
def test_steps_backwards_and_evaluations_equal(
    case: tuple[int, list[str], list[str], list[int], list[str], int, int],
) -> None:
    """With ties, every process that has a copy of a parameter gets the sum of the gradients of all stages.

    Where four stages take turns on two ranks, skip connections and ties lie within a rank and between both.
    """
    num_ranks, names, schedules, chunks, checkpoints, *_ = case
    number = len(names) * len(schedules) * len(chunks) * len(checkpoints)
    assert run_ranks(num_ranks, cases.same_bits, *case[1:]) == [number] * num_ranks


def test_delays_change_no_bit() -> None:
    assert run_ranks(3, cases.with_delays, 20) == [20] * 3
