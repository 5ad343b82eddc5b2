"""The bare sum of a step's products, by the programs of small models; and the rows of the benchmark."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench import measure
from bench.gpu import bare
from bench.gpu.subjects import ROWS
from gpipe_fast import GPipe
from gpipe_fast.container import runner_of
from gpipe_fast.lower import accumulation
from gpipe_fast.lower.operator_examples import Spec

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def products_that_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """On some processors, a product that adds to a gradient has other bits, and is none of a step."""
    monkeypatch.setattr(accumulation, "addmm_is_bitwise_equal", lambda a, b: True)


def stages_of_two_layers(checkpoint: str) -> tuple[GPipe, torch.Tensor]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    pipe = GPipe(model, [2, 1], devices=["cpu"] * 2, chunks=4, checkpoint=checkpoint)
    x = torch.randn(12, 8)
    pipe(x).sum().backward()
    return pipe, x


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_products_of_a_step_are_counted_with_their_shapes(checkpoint: str) -> None:
    pipe, _ = stages_of_two_layers(checkpoint)
    calls = bare.bare_calls(bare.programs_of(runner_of(pipe).planner, checkpoint, 4))
    forwards = 8 if checkpoint == "always" else 4  # the last layer is not needed again
    found = {(call.shapes().partition(" ")[2], call.operations()): number for call, number in calls.items()}
    assert found["16, 3x8, 8x16T, 3x16", 2 * 3 * 8 * 16] == forwards
    assert found["4, 3x16, 16x4T, 3x4", 2 * 3 * 16 * 4] == 4
    of_weights = {shape: number for (shape, _), number in found.items() if shape.startswith(("16x8", "4x16"))}
    # The first micro-batch writes the gradient of a weight; the others add to it.
    assert of_weights == {"16x8, 16x3T, 3x8": 3, "4x16, 4x3T, 3x16": 3}


def test_the_bare_call_computes_what_the_operator_computes() -> None:
    pipe, _ = stages_of_two_layers("never")
    for call in bare.bare_calls(bare.programs_of(runner_of(pipe).planner, "never", 4)):
        args, kwargs = call.examples("cpu")
        accumulates = call.shapes().startswith("float32 16x8")
        if accumulates:
            assert args[0] is kwargs["out"]
        assert isinstance(call.op(*args, **kwargs), torch.Tensor)


def test_attention_that_is_causal_counts_half_of_its_square() -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    operand = bare.Operand(0, Spec((2, 3, 64, 8), (1536, 512, 8, 1), torch.bfloat16))
    for causal, operations in ((False, 2 * 2 * 3 * 2 * 64 * 64 * 8), (True, 2 * 3 * 2 * 64 * 64 * 8)):
        arguments = (operand, operand, operand, 0.0, causal, False, None)
        assert bare.BareCall(op, arguments, ()).operations() == operations
    assert bare.BareCall(op, arguments, ()).operands() == [operand]


def test_bare_rows_add_up_and_begin_with_the_longest() -> None:
    pipe, _ = stages_of_two_layers("never")
    calls = bare.bare_calls(bare.programs_of(runner_of(pipe).planner, "never", 4))

    def microseconds_of(call: bare.BareCall) -> float:
        if call.shapes().startswith("float32 16,"):
            raise RuntimeError("cannot run alone")
        return 1000.0 if call.shapes().startswith("float32 4,") else 10.0

    rows, total = bare.bare_rows(calls, microseconds_of)
    others = sum(number for call, number in calls.items() if not call.name.startswith("addmm"))
    others += 6  # of weights
    assert total == pytest.approx(4 * 1.0 + others * 0.01)
    assert rows[0][2:] == [4, "1000.0", "4.00", f"{2 * 3 * 16 * 4 / 1e9:.3g}"]
    assert "FAILED: cannot run alone" in str(rows[-1])


def test_the_order_of_candidates_is_rotated() -> None:
    ran: list[str] = []
    found = measure.samples({name: lambda name=name: ran.append(name) for name in "abc"}, rounds=3)
    assert "".join(ran) == "abcbcacababc"
    assert [len(times) for times in found.values()] == [3, 3, 3]


def test_candidates_of_small_subjects_are_those_of_full_ones() -> None:
    for row in ROWS.values():
        assert row.full.names == row.small.names, row.title
        assert set(row.untimed) <= set(row.full.names)
