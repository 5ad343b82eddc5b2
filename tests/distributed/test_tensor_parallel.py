"""Stages whose layers are parallel along the dimension 'tp' of a mesh, in two and four processes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.distributed import tensor_cases as cases
from tests.distributed.launch import needs_gloo, run_ranks
from tests.distributed.tensor_cases import Fault

pytestmark = needs_gloo

NUM_SEEDS, PER_TEST = 60, 6
first_seeds = pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(PER_TEST, NUM_SEEDS, PER_TEST))],
)


@pytest.mark.parametrize("size", [2, 4])
@first_seeds
def test_generated_cases_have_the_bits_of_the_plain_loop(size: int, first: int) -> None:
    """Models, stages, schedules, checkpoint modes, numbers and sizes of micro-batches are drawn."""
    seeds = list(range(first, first + PER_TEST))
    assert run_ranks(size, cases.generated, seeds) == [[]] * size


@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.extended)])
def test_numbers_of_samples_that_change(name: str) -> None:
    assert run_ranks(2, cases.changing, name) == [[]] * 2


@pytest.mark.parametrize("length", [8, pytest.param(7, marks=pytest.mark.extended)])
def test_layers_that_redistribute(length: int) -> None:
    assert run_ranks(2, cases.redistributing, length) == [[]] * 2


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last", 0.5])
def test_programs_run_the_collectives_of_the_plan(checkpoint: Any) -> None:
    """A block of GPT sums once behind attention and once behind the MLP; and the gradients of the inputs of
    queries, keys, values and the MLP. Each stage has two blocks, and runs four micro-batches.
    """
    for stages in run_ranks(2, cases.counted, "gpt", checkpoint):
        for of_gloo, of_programs, forward, backward in stages:
            assert (forward, backward) == (2 * 2, 2 * 4)
            assert of_gloo == of_programs
            if checkpoint == "never":
                assert of_gloo == 4 * (forward + backward)


@pytest.mark.parametrize(
    ("stages", "schedule"),
    [
        (1, "1f1b"),
        *(
            pytest.param(*c, marks=pytest.mark.extended)
            for c in ((1, "gpipe"), (1, "zb-h1"), (2, "interleaved"))
        ),
    ],
)
def test_two_stages_of_a_process_with_delays(stages: int, schedule: str) -> None:
    """Threads of two stages start their collectives in any order; each stage has groups of its own."""
    assert run_ranks(2 * stages, cases.delayed, stages, schedule, 20) == [[]] * 2 * stages


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_memory_counts_the_parts_of_a_process(name: str) -> None:
    for rows in run_ranks(2, cases.counted_bytes, name):
        assert [predicted for predicted, _ in rows] == [stored for _, stored in rows]


def test_collectives_need_no_gil() -> None:
    assert run_ranks(2, cases.without_gil) == [True] * 2


# Which rank survivors of a fault may name, and how; or its stage.
ERRORS = [
    r"rank {rank} has failed, so no rank changed anything",
    r"rank {rank} is lost",
    r"exchanges tensors with ranks \[{rank}\] along 'tp', which have ended or take longer",
    r"for ranks \[{rank}\], which have ended or take longer",
    r"(to|from) stage {stage}, in another process, failed: that process has ended, or takes longer",
]


@pytest.mark.xdist_group("faults")
@pytest.mark.parametrize("seed", [s if s < 6 else pytest.param(s, marks=pytest.mark.soak) for s in range(30)])
def test_a_random_fault(seed: int) -> None:
    """Only a rank that hangs is waited for until the timeout; other faults end all waits at once."""
    size, stages = ((2, 1), (4, 2))[seed % 2]
    fault = Fault.of_seed(seed, stages, size)
    hangs, timeout = ([fault.rank], 10.0) if fault.how == "SIGSTOP" else ([], 60.0)
    found = run_ranks(size, cases.failing, fault, stages, timeout, hangs=hangs)
    expected = [each.format(rank=fault.rank, stage=fault.place[0]) for each in ERRORS]
    for rank, (error, goes_on, seconds) in enumerate(each or ("", False, 0.0) for each in found):
        if fault.how == "ValueError":
            assert "injected ValueError" in error
            assert goes_on
        elif rank != fault.rank:
            assert any(re.search(each, error) for each in expected), (fault, rank, error)
        assert seconds < (2 * timeout if hangs else timeout / 2), (fault, rank, error)


@pytest.mark.parametrize(
    ("size", "stages", "odd"),
    [(2, 1, 1), *(pytest.param(4, 2, n, marks=pytest.mark.extended) for n in (0, 3))],
)
def test_a_rank_that_differs(size: int, stages: int, odd: int) -> None:
    """Each is refused before the timeout, with the name of what differs."""
    others = r"run other collectives than those of rank \d, .* differ in collective \d of \dF, "
    if stages > 1:  # the other stage may be the first to find the operators of this one
        others += r"|differ in the operators of stage \d: here "
    names = {
        "order": others,
        "more": others,
        "schedule": "differ in the schedule: here ",
        "actions": "differ in the schedule: here ",
        "chunks": "differ in chunks: here ",
        "checkpoint": "differ in checkpoint: here ",
        "balance": "differ in balance: here ",
        "samples": "differ in input 0: here ",
        "seed": r"differ in the mini-batch's seed \(torch.manual_seed\): here ",
        "method": "differ in the method: here ",
        "no_grad": r"differ in torch.is_grad_enabled\(\): here ",
    }
    for rank, found in enumerate(run_ranks(size, cases.disagreeing, odd, stages)):
        assert found.pop("nothing")[:2] == ("", True)
        for name, (error, is_changed, seconds) in found.items():
            assert re.search(names[name], error), (rank, name, error)
            assert not is_changed, name
            assert seconds < 3 * cases.TIMEOUT, name


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt", marks=pytest.mark.extended)])
def test_replicas_of_shards(name: str) -> None:
    run_ranks(4, cases.replicated, name)


@pytest.mark.parametrize("number", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_pipelines_leave_no_files_and_threads(number: int) -> None:
    for found in run_ranks(2, cases.constructed, number):
        assert all(last <= early for last, early in zip(found[-1], found[4], strict=True)), found


def test_what_is_refused() -> None:
    for found in run_ranks(2, cases.refused):
        returned, no_mesh, no_shard, start, uneven, changed, gradients = found
        assert "returns a DTensor" in returned
        assert "pass GPipe mesh=" in no_mesh
        assert "no parameter of the layers is a DTensor" in no_shard
        assert "'weight' of layer 1 (Linear) differs between rank 0 and rank 1" in start
        assert "all_gather_into_tensor [2, 'torch.float32', (2, 3, 16)]" in uneven
        assert "modified by an inplace operation" in changed
        assert gradients == "[]"
