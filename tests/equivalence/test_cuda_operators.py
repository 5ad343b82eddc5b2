"""On a GPU, traces call the operators that eager autograd dispatches; shown without a GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.equivalence.cuda_operators import ALL, MODES
from tests.equivalence.cuda_operators_table import explained, run
from tests.fake_cuda.build import can_build
from tests.sampling import seed

pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
)

# What once had other operators than eager, or none.
KNOWN = [
    ("fp32", "BatchNorm2d"),
    ("evaluation", "BatchNorm2d"),
    ("autocast to fp16", "model: convolution and batch norm"),
    ("autocast to fp16", "BatchNorm2d without statistics"),
    ("fp32", "RMSNorm"),
    ("fp32", "MultiheadAttention unweighted"),
    ("bf16", "TransformerEncoderLayer"),
]
# Eager refuses these, too.
REFUSED = {("autocast to bf16", "BCELoss"), ("autocast to fp16", "BCELoss")}


def _check(configurations: Sequence[tuple[str, str]], libraries: tuple[Path, Path]) -> None:
    verdicts = run(configurations, libraries)
    assert [(v.mode, v.name) for v in verdicts] == list(configurations)
    assert {(v.mode, v.name): v.reason for v in verdicts if v.reason}.keys() <= REFUSED
    unknown = {
        f"{v.name} ({v.mode})": lines
        for v in verdicts
        if (lines := [line for line, text in explained(v).items() if text is None])
    }
    assert unknown == {}


def test_sample(libraries: tuple[Path, Path]) -> None:
    small = [c for c in ALL if "torchvision" not in c[1] and c not in KNOWN]
    _check([*KNOWN, *random.Random(f"{seed()}").sample(small, 40)], libraries)


@pytest.mark.extended
def test_larger_sample(libraries: tuple[Path, Path]) -> None:
    _check(random.Random(f"{seed()} larger").sample(ALL, 120), libraries)


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
def test_all(mode: str, libraries: tuple[Path, Path]) -> None:
    _check([c for c in ALL if c[0] == mode], libraries)
