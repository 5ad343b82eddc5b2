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
# By stage: what is replaced in the forward and in the backward, which recomputes. Sums after dropout are left
# alone in a low precision: in these small stages their partial sums are larger than what they save.
EXPECTED: dict[str, tuple[list[str], list[str]]] = {
    "gelu": ([], [f"gelu, gelu backward, {SUMS}"]),
    "gelu, last": ([], [f"gelu backward, {SUMS}"]),
    "relu of rows": ([], [f"relu, relu backward, {SUMS}"]),
    "relu, dropout": (["relu, dropout"], ["relu, dropout, relu backward, dropout backward"]),
    "silu, dropout of rows": (["silu, dropout"], ["silu, dropout, silu backward, dropout backward"]),
    "relu of images": ([], ["relu backward, images"]),
    "new gelu": (["gelu_tanh"], [f"gelu_tanh, gelu_tanh backward, {SUMS}"]),
    "new gelu of rows": (["gelu_tanh"], [f"gelu_tanh, gelu_tanh backward, {SUMS}"]),
    "quick gelu": (["quick_gelu"], [f"quick_gelu, quick_gelu backward, {SUMS}"]),
    "chunks": (["gated silu, chunks"], ["gated silu and its backward, chunks"]),
    "chunks, up first": (["gated gelu, chunks"], ["gated gelu and its backward, chunks"]),
    "slices": (["gated silu, slices"], ["gated silu and its backward, slices"]),
    "chunks of rows": (["gated relu, chunks"], ["gated relu and its backward, chunks"]),
    "unbind": ([], [f"gradients of unbind, {SUMS}"]),
    "indices": ([], [f"gradients of indices, {SUMS}"]),
    "indices in heads": ([], [f"gradients of indices in each head, {SUMS}"]),
}


def expected_names(precision: str) -> dict[str, list[list[str]]]:
    found = {name: [list(forward), list(backward)] for name, (forward, backward) in EXPECTED.items()}
    if precision == "fp32":
        for name in ("relu, dropout", "silu, dropout of rows"):
            found[name][1][0] += f", {SUMS}"
    if precision == "autocast":
        # A power makes the activation fp32.
        for name in ("new gelu", "new gelu of rows"):
            forward, backward = "gelu_tanh, cast", f"gelu_tanh, cast, gelu_tanh backward, {SUMS}"
            found[name] = [[forward], [backward]]
    return {f"{name}, {precision}": names for name, names in found.items()}


def test_activations_and_packed_projections_are_replaced_under_autocast(libraries: tuple[Path, Path]) -> None:
    (line,) = run("activation_cases.py", libraries, "autocast")
    assert json.loads(line) == expected_names("autocast")


@pytest.mark.extended
def test_activations_and_packed_projections_are_replaced(libraries: tuple[Path, Path]) -> None:
    (line,) = run("activation_cases.py", libraries, "bf16", "fp32")
    assert json.loads(line) == expected_names("bf16") | expected_names("fp32")
