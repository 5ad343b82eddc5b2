"""Activations, gated activations and packed projections in small stages: what is replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fake_cuda.build import can_build
from tests.fake_cuda.process import run

pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
)

SUMS = "column sums"
NEW_GELU = "mul, pow, mul, add, mul, tanh, add, mul"
NEW_GELU_BACKWARD = "pow, mul, mul, mul, tanh_backward, mul, mul, mul, add, mul, add"
DROPOUT = "keyed_bernoulli, mul, mul"
# By stage: what is replaced in the forward and in the backward, which recomputes. Regions have the names of
# their operators; the sum is the gradient of a bias.
EXPECTED: dict[str, tuple[list[str], list[str]]] = {
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


def check(libraries: tuple[Path, Path], *precisions: str) -> None:
    (line,) = run("activation_cases.py", libraries, *precisions)
    found = {name: tuple(map(_without_casts, graphs)) for name, graphs in json.loads(line).items()}
    assert found == {f"{name}, {how}": names for name, names in EXPECTED.items() for how in precisions}


def _without_casts(replaced: list[str]) -> list[str]:
    """Returns names that do not depend on autocast, whose casts are in the same kernels."""
    return [", ".join(o for o in name.split(", ") if o != "_to_copy") for name in replaced]


def test_activations_and_packed_projections_are_replaced_under_autocast(libraries: tuple[Path, Path]) -> None:
    check(libraries, "autocast")


@pytest.mark.extended
def test_activations_and_packed_projections_are_replaced(libraries: tuple[Path, Path]) -> None:
    check(libraries, "bf16", "fp32")
