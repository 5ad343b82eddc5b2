"""Ranks that fail, differ, end or stop: all ranks raise the same error in time, and nothing has changed."""

from __future__ import annotations

import re

import pytest

from tests.distributed import cases
from tests.distributed.launch import needs_gloo, run_programs, run_ranks

pytestmark = needs_gloo


# All ranks of two, three and four, of which the latter have two stages and two replicas.
RANKS = [(number, rank) for number in (2, 3, 4) for rank in range(number)]
NUM_STAGES = {2: 2, 3: 3, 4: 2}


@pytest.mark.parametrize(
    ("num_ranks", "rank", "action"),
    [
        (2, 1, "1I2"),
        (4, 2, "0B0"),
        *(pytest.param(n, rank, f"{rank % NUM_STAGES[n]}F1", marks=pytest.mark.soak) for n, rank in RANKS),
    ],
)
def test_an_action_fails(num_ranks: int, rank: int, action: str) -> None:
    """With replicas, the first stage of the other one waits for the sum when the last action fails."""
    found = run_ranks(num_ranks, cases.failing, NUM_STAGES[num_ranks], rank, action)
    place = rf"stage {action[0]}, layer \d \(\w+\), micro-batch {action[2]}"
    text = rf"injected ValueError \(in action {action}: {place}\)"
    for number, errors in enumerate(found):
        cause = f"RuntimeError: rank {rank} has failed, so no rank changed anything: "
        for error in errors:
            assert re.fullmatch(("ValueError: " if number == rank else cause) + text, error)


def test_calls_differ() -> None:
    """The error names what differs, whether plans are new or not, and the ranks go on afterwards."""
    (first, own), (second, other) = run_ranks(2, cases.differing)
    for errors in (first, second):
        chunks, shape, mode, method, kind, no_tensor = errors
        assert "differ in chunks: here " in chunks
        assert "differ in input 0: here float32[" in shape
        assert "differ in layer 0 (Linear): here " in mode
        assert "differ in torch.is_grad_enabled(): here " in method
        assert "layer 1 (BatchNorm1d) cannot be traced faithfully" in kind
        assert "expected Tensor, but got str" in no_tensor
    statistics = [f"1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert own == ["0.weight", "0.bias", "1.weight", "1.bias", *statistics], "each rank has its stage only"
    assert other == ["4.weight", "4.bias"]


def test_an_output_gets_no_gradient() -> None:
    *others, last = run_ranks(3, cases.unused_output)
    assert last[0].startswith("RuntimeError: output 1 of the last stage got no gradient; with a mesh, ")
    assert all(errors[0].startswith("RuntimeError: rank 2 has failed") for errors in others)
    for errors in (last, *others):
        assert "a call of the pipeline has failed in some process since the forward" in errors[1]


@pytest.mark.parametrize(
    ("how", "num_ranks", "rank"),
    [
        ("stop", 3, 1),
        ("exit", 4, 1),
        ("kill", 3, 1),
        *(
            pytest.param(how, *each, marks=pytest.mark.soak)
            for how in ("stop", "exit", "kill")
            for each in RANKS
        ),
    ],
)
def test_a_rank_is_lost(how: str, num_ranks: int, rank: int) -> None:
    """Its connections close when it ends; if it stops, the timeout is over first."""
    found = run_ranks(num_ranks, cases.losing_a_rank, how, NUM_STAGES[num_ranks], rank, hangs=[rank])
    del found[rank]
    place = f"stage {rank % NUM_STAGES[num_ranks]}"
    for error in found:
        text = rf"rank {rank} is lost|for ranks \[{rank}\], which have|{place}, in another process, failed"
        assert re.search(text, error)
        blamed = re.findall(r"rank (\d) (?:has failed|is lost)", error)
        assert set(blamed) <= {str(rank)}, f"the rank that is lost is named, not those of {error!r}"


@pytest.mark.parametrize(
    ("num_ranks", "slow_rank", "changes"),
    [
        (2, 1, ["first"]),
        (2, 0, ["attribute"]),
        *(
            pytest.param(n, rank, [*cases.NEW_PLANS], marks=pytest.mark.extended)
            for n in (2, 3)
            for rank in range(n)
        ),
    ],
)
def test_a_rank_compiles_for_longer_than_the_timeout(
    num_ranks: int, slow_rank: int, changes: list[str]
) -> None:
    """The others wait, in the first call and whenever a plan is new."""
    found = run_ranks(num_ranks, cases.compiling_longer, slow_rank, changes)
    assert found == [[""] * len(changes)] * num_ranks


@pytest.mark.extended
@pytest.mark.parametrize("changes", [["first"], ["chunks"]], ids=str)
def test_a_rank_dies_while_it_compiles(changes: list[str]) -> None:
    other, dead = run_ranks(2, cases.compiling_longer, 1, changes, True)
    assert dead is None
    assert re.search(r"for ranks \[1\], which have ended or take longer|that process has ended", other[0])


@pytest.mark.extended
def test_a_rank_with_the_store_stops() -> None:
    _, *others = run_ranks(3, cases.losing_the_store, hangs=[0], has_store=True)
    for error in others:
        assert "the store of torch.distributed has not answered for 10.0 s" in error


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("before the backward", "no loss"),
        pytest.param("before a call", "no data", marks=pytest.mark.extended),
    ],
)
def test_an_error_outside_of_calls(place: str, error: str) -> None:
    """The other rank, which waits, raises it; its timeout is longer than the test's."""
    other, last = run_programs(2, f"cases.failing_outside({place!r})")
    assert f"ValueError: {error}\n" in last
    expected = "rank 1 has failed, so no rank changed anything: its process has ended with ValueError"
    assert f"RuntimeError: {expected}: {error}\n" in other


@pytest.mark.parametrize(
    ("num_ranks", "odd"),
    [(2, 0), *(pytest.param(*each, marks=pytest.mark.soak) for each in RANKS if each != (2, 0))],
)
def test_ranks_disagree(num_ranks: int, odd: int) -> None:
    """Each rank that raises names what differs, and who, and none has changed anything."""
    found = run_ranks(num_ranks, cases.disagreeing, odd)
    names = {
        "the optimizer": "the argument optimizer",
        "max_norm": "the argument max_norm",
        "the scaler": "the argument scaler",
        "the seed": r"the mini-batch's seed \(torch.manual_seed\)",
        "chunks": "chunks",
        "the input": "input 0",
        "an attribute": "the operators of stage 0",
        "code": "the operators of stage 0",
    }
    for errors in found:
        assert errors.pop("nothing") == ("", True)
        for name, (error, is_changed) in errors.items():
            assert re.search(f"they differ in {names[name]}: here .*, there ", error), name
            ranks = re.search(r"rank (\d) calls the pipeline with other arguments than rank (\d)", error)
            assert ranks is not None, error
            assert str(odd) in ranks.groups(), error
            assert not is_changed


def test_tied_copies_start_different() -> None:
    errors = run_ranks(2, cases.tied_to_others)
    assert all("the tied copies of 'weight' of layer 0 (Embedding)" in error for error in errors), errors


def test_ranks_make_other_runs() -> None:
    *others, last = run_ranks(3, cases.going_on)
    for errors in (*others, last):
        assert all("make calls, backwards and recordings in the same order" in error for error in errors)


def test_an_update_fails() -> None:
    """The step has succeeded by then, so the others raise the error when they next wait."""
    first, failed, last = run_ranks(3, cases.failing_to_update)
    assert failed == "ZeroDivisionError: division by zero"
    for other in (first, last):
        assert other == f"RuntimeError: rank 1 has failed, so no rank changed anything: {failed}"
