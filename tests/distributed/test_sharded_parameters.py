"""Stages whose parameters are divided along the dimension 'fsdp' of a mesh, in two and four processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import sharded_cases as cases
from tests.distributed.launch import needs_gloo, run_ranks
from tests.distributed.test_tensor_parallel import ERRORS, PER_TEST, first_seeds

pytestmark = needs_gloo


@pytest.mark.parametrize("size", [2, 4])
@first_seeds
def test_generated_cases_have_the_sums_of_plain_loops(size: int, first: int) -> None:
    """Models, stages, schedules, checkpoint modes, numbers and sizes of micro-batches are drawn."""
    seeds = list(range(first, first + PER_TEST))
    assert run_ranks(size, cases.generated, seeds) == [[]] * size


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_parameters_of_all_kinds(size: int, checkpoint: str) -> None:
    assert run_ranks(size, cases.mixed, checkpoint) == [[]] * size


@pytest.mark.parametrize(("size", "stages", "balance"), [(2, 1, (6,)), (2, 1, (3, 3)), (4, 2, (3, 3))])
@pytest.mark.parametrize(("checkpoint", "chunks"), [("never", 8), ("always", 2)])
def test_a_step_gathers_once_and_sums_once(
    size: int, stages: int, balance: tuple[int, ...], checkpoint: Any, chunks: int
) -> None:
    """A process gathers the parameters of its stages together, and sums the gradients of each."""
    own = len(balance) // stages
    assert run_ranks(size, cases.counted, stages, balance, checkpoint, chunks) == [(1 + own, 1, 1)] * size


@pytest.mark.parametrize("dim", ["fsdp", "tp"])
@pytest.mark.parametrize(("name", "size", "stages"), [("llama", 2, 1), ("gpt", 4, 2)])
def test_training_with_clipping_saved_and_loaded_elsewhere(
    name: str, size: int, stages: int, dim: str, tmp_path: Path
) -> None:
    found = run_ranks(size, cases.trained, dim, name, stages, tmp_path)
    losses, later = found[0]
    assert found == [(losses, later)] * size
    assert losses[-1] < losses[0]
    for other, number in [(1, 1), (4, 2)] if size == 2 else [(1, 1), (2, 1)]:
        for losses in run_ranks(other, cases.loaded, dim, name, number, tmp_path):
            assert losses == pytest.approx(later, rel=1e-4)


def test_weights_of_a_plain_model_are_loaded() -> None:
    for differences in run_ranks(2, cases.loaded_whole):
        assert max(differences) < 1e-4


def test_changes_inference_and_memory() -> None:
    """In one start of the processes: a parameter that changes before the backward, calls in inference mode,
    and what memory counts.
    """
    for changed, inference, (counted, own, whole) in run_ranks(2, cases.several):
        assert "modified by an inplace operation" in changed
        assert inference < 1e-4
        assert counted == own + whole
        assert own == pytest.approx(whole / 2, rel=0.01)


@pytest.mark.xdist_group("faults")
@pytest.mark.parametrize(
    ("how", "size", "stages", "place"),
    [
        ("ValueError", 2, 1, "gather"),
        ("ValueError", 4, 2, "1W3"),
        ("SIGKILL", 4, 2, "gather"),
        ("SIGKILL", 2, 1, "0B3"),
        ("SIGSTOP", 2, 1, "gather"),
        ("SIGSTOP", 4, 2, "1W3"),
    ],
)
def test_a_rank_fails_before_it_gathers_or_sums(how: str, size: int, stages: int, place: str) -> None:
    hangs = [size - 1] if how == "SIGSTOP" else []
    *others, last = run_ranks(size, cases.failing, how, stages, place, hangs=hangs)
    expected = [
        each.format(rank=size - 1, stage=stages - 1) for each in (*ERRORS, r"from ranks \[{rank}\] along")
    ]
    for error in others:
        assert any(re.search(each, error) for each in expected), error
    if how == "ValueError":
        assert "injected" in last


def test_layers_beside_those_of_tensor_parallelism() -> None:
    assert max(run_ranks(4, cases.beside_tensor_parallelism)) < 1e-5


@pytest.mark.parametrize("dim", ["fsdp", "dp_replicate"])
def test_stages_without_parameters(dim: str) -> None:
    assert run_ranks(2, cases.stage_without_parameters, dim) == [[]] * 2
