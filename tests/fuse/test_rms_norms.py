"""RMSNorm and rotary embeddings in small stages: what is replaced, and which operators are left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fake_cuda.build import can_build
from tests.fake_cuda.process import run

pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
)

NORM, CAST, ADD, ADD_CAST = "RMS norm", "RMS norm, cast", "add, RMS norm", "add, RMS norm, cast"
BACK, BACK_ADD, BACK_CAST = "RMS norm backward", "RMS norm backward, add", "RMS norm backward, add, cast"
ROTARY, ROTATED, COPIED = "rotary", "rotary, cast", "rotary backward, copy"
PRODUCT = "sum in a product"
# By stage: what is replaced in the forward and in the backward. One layer of "torch" is left, and both
# norms of "heads": for these PyTorch's fused operators move as many bytes.
IN_ONE_DTYPE = {
    "torch": ([ADD, ADD], [BACK, BACK_ADD, BACK_ADD, ADD]),
    "heads": ([], []),
    "transformers": ([NORM, ADD, ADD], [NORM, BACK, BACK_ADD, BACK_ADD, ADD]),
    "frozen": ([NORM, ADD, PRODUCT], [NORM, BACK_ADD, BACK_ADD, ADD]),
    "projection": ([NORM], [f"{NORM}, {BACK}"]),
    "rotary": ([ROTARY, ROTARY], [ROTARY, ROTARY, COPIED, COPIED, *[PRODUCT] * 4]),
}
UNDER_AUTOCAST = {
    "torch": ([CAST, ADD, ADD_CAST], [BACK, BACK_ADD, BACK_CAST, CAST, ADD_CAST]),
    "heads": ([NORM], [NORM, BACK, "sum of 2"]),
    "transformers": ([CAST, ADD, ADD_CAST], [BACK, BACK_ADD, BACK_CAST, CAST, ADD_CAST]),
    "frozen": ([CAST, ADD_CAST], [BACK_ADD, BACK_CAST, CAST, ADD_CAST]),
    "projection": ([CAST], [f"{NORM}, {BACK}"]),
    "rotary": ([ROTATED, ROTATED], [COPIED, COPIED, ROTATED, ROTATED, PRODUCT, PRODUCT, "sum of 3"]),
}
# Products, attention, additions of gradients and of residuals, casts of parameters and of gradients.
MAY_BE_LEFT = {"mm", "addmm", "_unsafe_view", "add", "_to_copy"}


def check(
    precision: str, expected: dict[str, tuple[list[str], list[str]]], libraries: tuple[Path, Path]
) -> None:
    (line,) = run("replaced_cases.py", libraries, precision)
    found = json.loads(line)
    assert {name: (forward[0], backward[0]) for name, (forward, backward) in found.items()} == {
        f"{name}, {precision}": names for name, names in expected.items()
    }
    for name in ("transformers", "frozen", "projection", "rotary"):
        left = {operator for _, operators in found[f"{name}, {precision}"] for operator in operators}
        assert {operator for operator in left if "attention" not in operator} <= MAY_BE_LEFT, name


def test_norms_and_rotary_embeddings_are_replaced_under_autocast(libraries: tuple[Path, Path]) -> None:
    check("autocast", UNDER_AUTOCAST, libraries)


@pytest.mark.extended
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_norms_and_rotary_embeddings_are_replaced(precision: str, libraries: tuple[Path, Path]) -> None:
    check(precision, IN_ONE_DTYPE, libraries)
