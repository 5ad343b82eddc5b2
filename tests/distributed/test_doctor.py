"""``gpipe-fast doctor`` under torchrun: the ranks, their versions, and every edge in both directions."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import gpipe_fast
from tests.distributed import doctor_cases as cases
from tests.distributed.launch import needs_gloo, run_as_torchrun, run_ranks

pytestmark = needs_gloo


@pytest.fixture
def port() -> Iterator[int]:
    """Yields the port of a store like that of torchrun."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def test_two_ranks_of_torchrun() -> None:
    found = json.loads(run_as_torchrun(2, "-m", "gpipe_fast", "doctor", "--json"))  # of rank 0 alone
    assert found["versions"]
    assert found["problems"] == []
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert (rank["torch"], rank["gpipe_fast"]) == (torch.__version__, gpipe_fast.__version__)
        assert rank["host"]
        assert rank["device"]
    edges = [edge for edge in found["edges"] if edge["backend"] == "gloo"]
    assert [(edge["sender"], edge["receiver"]) for edge in edges] == [(0, 1), (1, 0)]
    assert all(edge["latency"] > 0 and edge["bandwidth"] > 0 for edge in edges)


def test_versions_that_differ(port: int) -> None:
    (status, found, _), other = run_ranks(2, cases.with_an_older_version, port)
    assert (status, other[0]) == (1, 1)
    (problem,) = found["problems"]
    assert "the versions of gpipe_fast differ: 0.1.0 on rank 0, 0.0.1 on rank 1" in problem


def test_an_edge_that_fails(port: int) -> None:
    (status, found, _), *others = run_ranks(3, cases.with_a_failing_edge, port)
    assert (status, *(other[0] for other in others)) == (1, 1, 1)
    failed = [(edge["sender"], edge["receiver"]) for edge in found["edges"] if edge["error"]]
    assert failed == [(1, 2), (2, 1)]
    assert all("no route" in edge["error"] for edge in found["edges"] if edge["error"])
    assert len(found["edges"]) == 6
    assert len(found["problems"]) == 2


@pytest.mark.extended
def test_a_rank_that_hangs(port: int) -> None:
    (status, found, _), _, other = run_ranks(3, cases.with_a_rank_that_hangs, port, hangs=[1])
    assert (status, other[0]) == (1, 1)
    failed = [(edge["sender"], edge["receiver"]) for edge in found["edges"] if edge["error"]]
    assert failed == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert all("rank 1" in problem for problem in found["problems"])


def test_a_rank_that_does_not_come(port: int) -> None:
    found = run_ranks(2, cases.doctor, port, 3, 1.0)
    assert [status for status, _, _ in found] == [1, 1]
    for rank, (_, _, error) in enumerate(found):
        assert f"rank {rank} has waited for 1.0 s for ranks [2] of 3, which have not come" in error
