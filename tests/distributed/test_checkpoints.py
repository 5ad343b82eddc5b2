"""What any number of processes has saved, any other loads, and trains on with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import checkpoint_cases as cases
from tests.distributed.launch import needs_gloo, run_ranks

pytestmark = needs_gloo

KINDS = [(3, "mesh"), (2, "mesh"), (2, "on meta"), (1, "mesh"), (1, "plain")]


def whole(results: list[list[Any]]) -> list[Any]:
    """Returns the results of all ranks as one; what several ranks have is equal."""
    states = []
    for number in range(2):
        parts = [result[number] for result in results]
        joined = {name: value for part in parts for name, value in part.items()}
        assert all(value == joined[name] for part in parts for name, value in part.items())
        states.append(joined)
    return [*states, results[-1][2]]


def test_saved_by_the_plain_model(tmp_path: Path) -> None:
    expected = whole(run_ranks(1, cases.saved, "norms", "plain", tmp_path))
    assert whole(run_ranks(2, cases.loaded, "norms", "mesh", tmp_path)) == expected


@pytest.mark.extended
def test_saved_by_a_model_that_is_not_sequential(tmp_path: Path) -> None:
    """Its names are those of the plain model, which loads it, too."""
    expected = whole(run_ranks(2, cases.saved, "from_model", "mesh", tmp_path))
    assert whole(run_ranks(2, cases.loaded, "from_model", "on meta", tmp_path)) == expected
    state = {"model": cases.small_gpt().state_dict()}
    cases.dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert {f"model {n}": t.tolist() for n, t in state["model"].items()}.items() <= expected[0].items()


@pytest.mark.parametrize("name", [pytest.param("norms", marks=pytest.mark.extended), "ties"])
def test_saved_by_four_processes(name: str, tmp_path: Path) -> None:
    expected = whole(run_ranks(4, cases.saved, name, "mesh", tmp_path))
    for number, kind in KINDS:
        found = whole(run_ranks(number, cases.loaded, name, kind, tmp_path))
        assert found[0] == expected[0], f"loaded by {number}, {kind}"
        # Where one stage uses a tied parameter twice, its gradients are added up in another order.
        if name == "norms" or number == 3:
            assert found[1:] == expected[1:], f"loaded by {number}, {kind}"
