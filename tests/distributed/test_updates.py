"""Updates of `step` over several processes equal those in one process, bit for bit."""

from __future__ import annotations

import pytest

from tests.distributed import update_cases as cases
from tests.distributed.launch import needs_gloo, run_ranks

pytestmark = needs_gloo


def test_clipping_and_scaling() -> None:
    """The gradients of one step are infinite in the first stage alone."""
    assert min(run_ranks(2, cases.same_bits, ["scaler and clipping"], "1f1b")) > 20


@pytest.mark.extended
@pytest.mark.parametrize(("num_ranks", "schedule", "num_replicas"), [(3, "1f1b", 1), (4, "gpipe", 2)])
def test_all_updates(num_ranks: int, schedule: str, num_replicas: int) -> None:
    found = run_ranks(num_ranks, cases.same_bits, list(cases.RECIPES), schedule, num_replicas)
    assert min(found) > 40


def test_an_update_fails() -> None:
    """An error before the ranks have exchanged norms is raised by all, and no parameter has changed."""
    first, last = run_ranks(2, cases.failing)
    assert last[0] == "ValueError: no norm"
    assert first[0] == "RuntimeError: rank 1 has failed, so no rank changed anything: ValueError: no norm"
    for errors in (first, last):
        assert "updates with {'max_norm': 0.2, 'scale': None}, and rank 0 with" in errors[1]
