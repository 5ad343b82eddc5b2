"""Fused kernels in stages: what they save, and their errors in Triton's interpreter on the fake runtime."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from bench import measure
from tests.conftest import HAS_TRITON
from tools import fake_cuda, fusion
from tools.stages import PRECISIONS, STAGES

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
# Stage, precision and checkpoint mode.
CASES = [
    ("GPT", "autocast", "except_last"),
    ("GPT", "autocast", "always"),
    ("GPT", "fp32", "never"),
    ("GPT", "bf16", "always"),
    ("Llama", "bf16", "always"),
    ("Llama", "autocast", "except_last"),
    ("head", "autocast", "always"),
    ("head, upcast", "bf16", "always"),
    ("BERT", "autocast", "never"),
    ("ViT", "bf16", "always"),
    ("GPT-2", "autocast", "except_last"),
    ("GPT-2, attention dropout", "fp32", "always"),
    ("ResNet", "autocast", "always"),
    ("U-Net", "fp32", "always"),
]
# Errors of gradients that are zero but for rounding differ more: the gradient of a key's bias, for example.
MAX_RATIO, MAX_RATIO_OF_NOISE = 2, 8


@pytest.mark.parametrize(
    "stages", [("GPT",), pytest.param(tuple(STAGES), marks=pytest.mark.extended)], ids=["some", "all"]
)
def test_bytes_and_launches_are_those_of_the_table(
    stages: tuple[str, ...], libraries: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that no longer replaces its operators shows here: `python -m tools fusion` counts again."""
    monkeypatch.delenv("GPIPE_FAST_MIN_REGION_BYTES", raising=False)  # the table leaves scalars to PyTorch
    backward, forward = fusion.tables(fusion.run("large", stages, libraries[0]))
    lines = (measure.RESULTS / "fusion.md").read_text().splitlines()
    committed = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    found = [list(map(str, row)) for row in (*backward, *forward.rows)]
    assert list(map(numbers, found)) == [numbers(row) for row in committed if row and row[0] in stages]


def numbers(row: list[str]) -> list[object]:
    """Returns a row of the table with its numbers as such."""
    return [*row[:2], *(float(cell.rstrip("%")) for cell in row[2:])]


@pytest.mark.parametrize(
    "case", [CASES[0], *(pytest.param(c, marks=pytest.mark.extended) for c in CASES[1:])], ids=" ".join
)
def test_errors_are_at_most_twice_those_of_pytorch(
    case: tuple[str, str, str], run: Callable[..., list[str]]
) -> None:
    captured = ["captured"] if case == CASES[1] else []
    (line,) = run("fusion_cases.py", *case, *captured, interpreted=True, fused=True)
    found = json.loads(line)
    assert found["kernels"]
    assert found["warnings"] == found["failures"] == []
    for index, ((error, rounding), (expected, _)) in enumerate(found["errors"]):
        # The elements are of size rounding / eps: they are noise if that is not above PyTorch's error.
        noise = rounding < 1e-3 * expected
        allowed = max((MAX_RATIO_OF_NOISE if noise else MAX_RATIO) * expected, 2 * rounding)
        assert error <= allowed, f"result {index}: {error / allowed:.3f} of the error allowed"


@pytest.mark.parametrize(
    "case",
    [("GPT", "bf16"), *(pytest.param(c, marks=pytest.mark.extended) for c in product(STAGES, PRECISIONS))],
    ids=" ".join,
)
def test_no_generated_kernel_spills_registers(case: tuple[str, str], libraries: tuple[Path, Path]) -> None:
    number, found = fake_cuda.call(libraries[0], "tests.unit.kernels.compiled:spilling_kernels_of", *case)
    assert number or case[0].startswith("head")  # whose loss is no generated kernel
    assert found == []
