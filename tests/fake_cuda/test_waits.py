"""Each stream wait in csrc/ is needed: without it, deferred work gives wrong bits.

`python -m tests.fake_cuda.wait_table` prints the table of all waits.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda import wait_table
from tests.fake_cuda.build import can_build
from tests.fake_cuda.call_sites import waits_in_source

pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("scenario", "min_needed"),
    [("peer", 6), ("captured, in turn", 8), pytest.param("pinned", 6, marks=pytest.mark.soak)],
)
def test_missing_waits_give_wrong_bits(scenario: str, min_needed: int, libraries: tuple[Path, Path]) -> None:
    """Checks a minimum number of call sites; the other waits are needed in other scenarios or redundant."""
    found = list(wait_table.outcomes(libraries, scenario, wait_table.SEEDS))
    assert sum(outcome.symptom == "wrong bits" for outcome in found) >= min_needed, found


@pytest.mark.soak
def test_every_wait_is_needed_or_explained_as_redundant(capsys: pytest.CaptureFixture[str]) -> None:
    wait_table.main()
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("csrc/")]
    assert len(rows) == len(waits_in_source())
    assert [row for row in rows if "UNEXPLAINED" in row] == []
    unreached = [row.split(":")[0] for row in rows if "no scenario" in row]
    assert unreached == ["csrc/transport/pinned_ring.h"], "it waits when a pipeline ends, after the scenario"
