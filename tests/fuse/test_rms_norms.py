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

NORM, BACK, BOTH = "norm", "norm backward", "norm and norm backward"
ROTARY, ROTATED, COPIED = "rotary", "rotary, cast", "rotary backward, copy"
PRODUCT, ADD = "sum in a product", "add"
# By stage: what is replaced in the forward and in the backward, by the norms of each region. In one dtype, a
# layer of "torch" is left: nothing is added to its input, so PyTorch's fused operator moves as many bytes.
IN_ONE_DTYPE = {
    "torch": ([NORM] * 2, [NORM, BOTH, BACK, BACK]),
    "heads": ([NORM], [BOTH]),
    "transformers": ([NORM] * 3, [NORM, NORM, BOTH, BACK, BACK]),
    "frozen": ([NORM, NORM, PRODUCT], [NORM, BOTH, BACK]),
    "projection": ([NORM], [BOTH]),
    "rotary": ([ROTARY] * 2, [*[ROTARY] * 2, *[COPIED] * 2, *[PRODUCT] * 4]),
}
UNDER_AUTOCAST = {
    "torch": ([NORM] * 3, [NORM, NORM, BOTH, BACK, BACK]),
    "heads": ([NORM], [BOTH, ADD]),
    "transformers": ([NORM] * 3, [NORM, NORM, BOTH, BACK, BACK]),
    "frozen": ([NORM, NORM], [NORM, BOTH, BACK]),
    "projection": ([NORM], [BOTH]),
    "rotary": ([ROTATED] * 2, [*[ROTATED] * 2, *[COPIED] * 2, PRODUCT, PRODUCT, ADD]),
}
# Products, attention, casts of parameters and of single tensors.
MAY_BE_LEFT = {"mm", "addmm", "_unsafe_view", "_to_copy"}
# Two tensors are added, and one operator normalizes a tensor: no kernel moves fewer bytes.
ALSO_LEFT = {"heads": {"add"}, "frozen": {"add"}, "torch": {"_fused_rms_norm"}}


def kind(name: str) -> str:
    """Returns what a replacement computes: a region's norms, or what else its name says."""
    operators = set(name.split(", "))
    forward = not operators.isdisjoint({"mean", "_fused_rms_norm"})
    backward = not operators.isdisjoint({"div", "_fused_rms_norm_backward"})
    if forward or backward:
        return BOTH if forward and backward else NORM if forward else BACK
    return ADD if operators <= {"add", "_to_copy"} else name


def check(
    precision: str, expected: dict[str, tuple[list[str], list[str]]], libraries: tuple[Path, Path]
) -> None:
    (line,) = run("replaced_cases.py", libraries, precision)
    found = json.loads(line)
    assert {
        name: tuple(sorted(map(kind, replaced)) for replaced, _ in graphs) for name, graphs in found.items()
    } == {f"{name}, {precision}": tuple(map(sorted, names)) for name, names in expected.items()}
    for name in expected:
        left = {operator for _, operators in found[f"{name}, {precision}"] for operator in operators}
        left = {operator for operator in left if "attention" not in operator}
        assert left <= MAY_BE_LEFT | ALSO_LEFT.get(name, set()), name


def test_norms_and_rotary_embeddings_are_replaced_under_autocast(libraries: tuple[Path, Path]) -> None:
    check("autocast", UNDER_AUTOCAST, libraries)


@pytest.mark.extended
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_norms_and_rotary_embeddings_are_replaced(precision: str, libraries: tuple[Path, Path]) -> None:
    check(precision, IN_ONE_DTYPE, libraries)
