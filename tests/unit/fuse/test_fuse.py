"""What is replaced in small stages: RMSNorm, rotary embeddings, activations and packed projections."""

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


def check_norms(
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


@pytest.mark.extended
def test_norms_and_rotary_embeddings_are_replaced_under_autocast(libraries: tuple[Path, Path]) -> None:
    check_norms("autocast", UNDER_AUTOCAST, libraries)


@pytest.mark.extended
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_norms_and_rotary_embeddings_are_replaced(precision: str, libraries: tuple[Path, Path]) -> None:
    check_norms(precision, IN_ONE_DTYPE, libraries)


SUMS = "column sums"
NEW_GELU = "mul, pow, mul, add, mul, tanh, add, mul"
NEW_GELU_BACKWARD = "pow, mul, mul, mul, tanh_backward, mul, mul, mul, add, mul, add"
DROPOUT = "keyed_bernoulli, mul, mul"
# By stage: what is replaced in the forward and in the backward, which recomputes. Regions have the names of
# their operators; the sum is the gradient of a bias.
ACTIVATIONS: dict[str, tuple[list[str], list[str]]] = {
    "gelu": ([], ["gelu, gelu_backward, sum"]),
    "gelu, last": ([], ["gelu_backward, sum"]),
    "relu of rows": ([], ["relu, threshold_backward, sum"]),
    "relu, dropout": (
        [f"relu, {DROPOUT}"], [f"relu, {DROPOUT}, native_dropout_backward, threshold_backward, sum"],
    ),
    "silu, dropout of rows": (
        [f"silu, {DROPOUT}"], [f"silu, {DROPOUT}, native_dropout_backward, silu_backward, sum"],
    ),
    "relu of images": ([], ["relu, threshold_backward"]),
    "new gelu": ([NEW_GELU], [f"{NEW_GELU}, {NEW_GELU_BACKWARD}, sum"]),
    "new gelu of rows": ([NEW_GELU], [f"{NEW_GELU}, {NEW_GELU_BACKWARD}, sum"]),
    "quick gelu": (["mul, sigmoid, mul"], ["mul, sigmoid, mul, mul, mul, sigmoid_backward, mul, add, sum"]),
    "chunks": (["silu, mul"], ["silu, mul, mul, mul, silu_backward"]),
    "chunks, up first": (["gelu, mul"], ["gelu, mul, mul, mul, gelu_backward"]),
    # The gradients of slices are tensors of zeros into which one half is written; a region adds them.
    "slices": (["silu, mul"], ["silu, mul, mul, mul, silu_backward", "add, sum"]),
    "chunks of rows": (["relu, mul"], ["relu, mul, mul, mul, threshold_backward"]),
    "unbind": ([], [f"gradients of unbind, {SUMS}"]),
    "indices": ([], [f"gradients of indices, {SUMS}"]),
    "indices in heads": ([], [f"gradients of indices in each head, {SUMS}"]),
}  # fmt: skip


def check_activations(libraries: tuple[Path, Path], *precisions: str) -> None:
    (line,) = run("activation_cases.py", libraries, *precisions)
    found = {name: tuple(map(_without_casts, graphs)) for name, graphs in json.loads(line).items()}
    assert found == {f"{name}, {how}": names for name, names in ACTIVATIONS.items() for how in precisions}


def _without_casts(replaced: list[str]) -> list[str]:
    """Returns names that do not depend on autocast, whose casts are in the same kernels."""
    return [", ".join(o for o in name.split(", ") if o != "_to_copy") for name in replaced]


@pytest.mark.extended
def test_activations_and_packed_projections_are_replaced_under_autocast(libraries: tuple[Path, Path]) -> None:
    check_activations(libraries, "autocast")


@pytest.mark.extended
def test_activations_and_packed_projections_are_replaced(libraries: tuple[Path, Path]) -> None:
    check_activations(libraries, "bf16", "fp32")
