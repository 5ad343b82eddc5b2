"""Models of `GPipe.from_model` over several processes equal those in one process, bit for bit."""

from __future__ import annotations

import pytest

from tests.distributed import model_cases as cases
from tests.distributed.launch import needs_gloo, run_ranks

pytestmark = needs_gloo


def test_steps_and_evaluations_of_a_small_model() -> None:
    """With ties of all stages, a frozen block, dropout and buffers."""
    assert run_ranks(2, cases.same_bits, ["small"], ["1f1b"], [cases.BATCH], 0, False) == [1] * 2


@pytest.mark.extended
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_small_model(num_ranks: int) -> None:
    """With backwards, too, and seven samples in four micro-batches."""
    assert run_ranks(num_ranks, cases.same_bits, ["small"], ["1f1b"], [4]) == [1] * num_ranks


@pytest.mark.extended
def test_several_stages_on_each_rank() -> None:
    assert run_ranks(2, cases.same_bits, ["small"], ["interleaved", "gpipe"], [4], 4) == [2] * 2


@pytest.mark.extended
@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_models_of_transformers(name: str, num_ranks: int) -> None:
    """GPT-2 has a tie of its first and its last stage."""
    pytest.importorskip("transformers")
    assert run_ranks(num_ranks, cases.same_bits, [name], ["gpipe", "zb-h1"], [3]) == [2] * num_ranks


def test_inputs_differ() -> None:
    """The error says what differs, and the ranks go on afterwards."""
    for labels, call, kind in run_ranks(2, cases.differing):
        for error in (labels, call):
            assert "calls the model with other inputs than another rank" in error
            assert '"weights of micro-batches": [[], [], [0.' in error
        assert "AttributeError: 'str' object has no attribute 'flatten'" in kind
