"""Ranks are killed or stopped at random moments: all others end, and a restart trains the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from examples.gpt_distributed import last_step
from tests.distributed import fault_cases as cases
from tests.distributed.fault_cases import Fault
from tests.distributed.launch import needs_gloo, run_ranks

pytestmark = needs_gloo

NUM_SEEDS, NUM_IN_ALL_TESTS = 50, 1
# Seconds; longer than a first step on a busy machine.
TIMEOUT = 10.0

# What survivors of a kill or a stop may say.
ERRORS = [
    r"in another process, failed: that process has ended, or takes longer",
    r"for ranks \[[\d, ]+\], which have ended or take longer",
    r"cannot connect to rank \d, which has ended, or takes longer",
    # In a save, from torch.distributed.
    r"Connection closed by peer|Connection reset by peer|Timed out waiting",
]


def contents(folder: Path) -> dict[str, Any]:
    """Returns everything in a checkpoint."""
    joined = folder.with_suffix(".pt")
    dcp_to_torch_save(folder, joined)
    found = torch.load(joined, weights_only=False)
    return {f"{part} {name}": value for part in found for name, value in found[part].items()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], Path]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    (losses, error), *_ = run_ranks(2, cases.train, folder)
    assert error == ""
    assert list(losses) == list(range(1, cases.STEPS + 1))
    return losses, folder


@pytest.mark.xdist_group("faults")
@pytest.mark.parametrize(
    "seed",
    [s if s < NUM_IN_ALL_TESTS else pytest.param(s, marks=pytest.mark.soak) for s in range(NUM_SEEDS)],
)
def test_a_random_fault(seed: int, tmp_path: Path, uninterrupted: tuple[dict[int, float], Path]) -> None:
    expected, complete = uninterrupted
    size = 2 + seed % 2
    fault = Fault.of_seed(seed, size)
    hangs = [fault.rank] if fault.how == "stop" else []
    results = run_ranks(size, cases.train, tmp_path, fault, TIMEOUT, hangs=hangs, timeout=TIMEOUT)
    assert results[fault.rank] is None  # the fault has happened
    for losses, error in (found for found in results if found is not None):
        assert any(re.search(each, error) for each in ERRORS), f"{fault}: {error!r}"
        assert losses == {step: loss for step, loss in expected.items() if step in losses}
    for checkpoint in (path.parent for path in tmp_path.glob("*/.metadata")):
        ours, theirs = contents(checkpoint), contents(complete / checkpoint.name)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            same = torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value
            assert same, f"{fault}: {name} of {checkpoint.name}"
    steps = range(1 + last_step(tmp_path), cases.STEPS + 1)
    restart = run_ranks(2 + seed // 2 % 2, cases.train, tmp_path)
    assert restart == [({step: expected[step] for step in steps}, "")] * len(restart)
    assert last_step(tmp_path) == cases.STEPS
