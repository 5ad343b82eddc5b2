"""Traces call the operators that eager autograd dispatches on a GPU; the check needs no GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.contracts.contract_1_same_bits.cuda_operators import ALL_CONFIGURATIONS, MODES
from tests.contracts.contract_1_same_bits.cuda_operators_table import explain, run_configurations
from tests.fake_cuda.build import can_build
from tests.sampling import seed

pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
)

# Regressions: configurations whose operators once differed from eager's, or that failed to trace.
REGRESSIONS = [
    ("fp32", "BatchNorm2d"),
    ("evaluation", "BatchNorm2d"),
    ("autocast to fp16", "model: convolutions"),
    ("autocast to fp16", "BatchNorm2d without statistics"),
    ("fp32", "RMSNorm"),
    ("fp32", "MultiheadAttention unweighted"),
    ("bf16", "TransformerEncoderLayer"),
]
# Configurations that eager rejects, too.
REJECTED_BY_EAGER = {("autocast to bf16", "BCELoss"), ("autocast to fp16", "BCELoss")}


def _check_configurations(configurations: Sequence[tuple[str, str]], libraries: tuple[Path, Path]) -> None:
    verdicts = run_configurations(configurations, libraries)
    assert [(v.mode, v.name) for v in verdicts] == list(configurations)
    assert {(v.mode, v.name): v.reason for v in verdicts if v.reason}.keys() <= REJECTED_BY_EAGER
    unexplained = {
        f"{v.name} ({v.mode})": lines
        for v in verdicts
        if (lines := [line for line, text in explain(v).items() if text is None])
    }
    assert unexplained == {}


def test_operators_equal_eagers_on_a_sample_and_on_regressions(libraries: tuple[Path, Path]) -> None:
    others = [c for c in ALL_CONFIGURATIONS if c not in REGRESSIONS]
    _check_configurations([*REGRESSIONS, *random.Random(f"{seed()}").sample(others, 15)], libraries)


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
def test_operators_equal_eagers_on_all_configurations(mode: str, libraries: tuple[Path, Path]) -> None:
    _check_configurations([c for c in ALL_CONFIGURATIONS if c[0] == mode], libraries)
