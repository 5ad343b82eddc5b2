"""Models of `GPipe.from_model` over several processes equal those in one process, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import model_cases as cases
from tests.distributed.launch import needs_gloo, run_ranks

pytestmark = needs_gloo


def test_steps_and_evaluations_of_a_small_model() -> None:
    """With ties of all stages, a frozen block, dropout and buffers."""
    assert run_ranks(2, cases.same_bits, ["small"], ["1f1b"], [cases.BATCH], 0, False) == [1] * 2


@pytest.mark.extended
@pytest.mark.parametrize(
    ("num_ranks", "name", "schedules", "chunks", "num_stages"),
    [
        (3, "small", ["1f1b"], 4, 0),  # seven samples in four micro-batches
        (2, "small", ["interleaved", "gpipe"], 4, 4),  # several stages on each rank
        (2, "GPT-2", ["zb-h1"], 3, 0),  # with a tie of its first and its last stage
    ],
)
def test_backwards_and_steps(
    num_ranks: int, name: str, schedules: list[str], chunks: int, num_stages: int
) -> None:
    if name == "GPT-2":
        pytest.importorskip("transformers")
    found = run_ranks(num_ranks, cases.same_bits, [name], schedules, [chunks], num_stages)
    assert found == [len(schedules)] * num_ranks


def test_inputs_differ() -> None:
    """The error says what differs, and the ranks go on afterwards."""
    for labels, call, kind in run_ranks(2, cases.differing):
        for error in (labels, call):
            assert "calls the model with other inputs than another rank" in error
            assert '"numbers of targets": [' in error
        assert "AttributeError: 'str' object has no attribute 'flatten'" in kind


EVERY: list[tuple[int, Any]] = [(1, "never"), (4, "always"), (4, "except_last"), (4, 0.5)]


@pytest.mark.parametrize(
    ("kind", "size", "stages", "by_transformers", "settings"),
    [
        ("llama", 2, 1, False, EVERY),
        ("qwen3", 4, 2, True, EVERY[:2]),
        pytest.param("llama", 4, 2, True, EVERY, marks=pytest.mark.extended),
        pytest.param("llama tied", 4, 2, False, EVERY, marks=pytest.mark.extended),
        pytest.param("qwen2", 2, 1, False, EVERY, marks=pytest.mark.extended),
        pytest.param("qwen3", 2, 1, True, EVERY, marks=pytest.mark.extended),
        pytest.param("gpt_neox", 4, 2, False, EVERY, marks=pytest.mark.extended),
    ],
)
def test_models_with_a_plan_for_tensor_parallelism(
    kind: str, size: int, stages: int, by_transformers: bool, settings: Any
) -> None:
    assert run_ranks(size, cases.divided, kind, stages, by_transformers, settings) == [[]] * size


@pytest.mark.parametrize(
    ("dim", "size"),
    [("dp_replicate", 4), *(pytest.param("fsdp", n, marks=pytest.mark.extended) for n in (2, 4))],
)
def test_replicas_average_the_losses_of_models(dim: str, size: int) -> None:
    assert run_ranks(size, cases.replicated, dim) == [[]] * size
