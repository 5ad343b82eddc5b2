"""Quantized parameters: their parts, bytes, stand-ins, and moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast.layers.quantized import (
    is_quantized,
    is_wrapper,
    move_parts,
    owners_of,
    parts_of,
    stand_in,
    stored_bytes,
)
from tests.quantized import KINDS, PackedLinear, eight_bits

PARTS = {
    "own": {".state.scale", ".state.inner.table"},
    "NF4": {f".quant_state.{name}" for name in ("absmax", "code", "offset", "state2.absmax", "state2.code")},
    "NF4 without double quantization": {".quant_state.absmax", ".quant_state.code"},
    "torchao int8": {".qdata", ".scale", ".zero_point"},
    "torchao float8": {".qdata", ".scale"},
}


def weight_of(kind: str) -> Any:
    torch.manual_seed(0)
    return KINDS[kind](64, 32, torch.float32).weight


@pytest.mark.parametrize("kind", PARTS)
def test_parts_are_found_by_the_expressions_that_read_them(kind: str) -> None:
    weight = weight_of(kind)
    assert is_quantized(weight)
    assert is_wrapper(weight) == kind.startswith("torchao")
    found = parts_of(weight)
    assert found.keys() <= PARTS[kind]
    assert found.keys() >= PARTS[kind] - {".zero_point"}
    assert all(eval(f"weight{path}", {"weight": weight}) is part for path, part in found.items())


def test_plain_and_lazy_parameters_have_no_parts() -> None:
    for tensor in (torch.ones(2), nn.Parameter(torch.ones(2)), nn.LazyLinear(2).weight):
        assert not is_quantized(tensor)
        assert parts_of(tensor) == {}
        assert owners_of(torch.ones(2)) == []


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("own", 32 * 64 + 32 * 4 + 4),
        ("NF4 without double quantization", 32 * 64 // 2 + 32 * 4 + 16 * 4),
        ("torchao float8", 32 * 64 + 32 * 4),
    ],
)
def test_bytes_are_those_stored(kind: str, expected: int) -> None:
    assert stored_bytes(weight_of(kind)) == expected


def test_memory_that_a_part_shares_counts_once() -> None:
    weight: Any = eight_bits(64, 32, torch.float32).weight
    assert weight.CB.data_ptr() == weight.data_ptr()
    assert stored_bytes(weight) == 32 * 64 + 32 * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_stand_in_has_the_form_of_the_original(kind: str) -> None:
    def as_meta(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    weight = weight_of(kind)
    before = {path: part.device for path, part in parts_of(weight).items()}
    found = stand_in(weight, as_meta)
    assert found.is_meta
    assert found.shape == weight.shape
    assert {path: part.device for path, part in parts_of(weight).items()} == before
    assert type(found) is type(weight)
    assert parts_of(found).keys() == parts_of(weight).keys()
    assert {part.device.type for part in parts_of(found).values()} == {"meta"}


def test_parts_move_with_the_layer() -> None:
    model: Any = nn.Sequential(PackedLinear(4, 4))
    move_parts(model, lambda tensor: tensor.double())
    assert {part.dtype for part in parts_of(model[0].weight).values()} == {torch.float64}


def test_scales_that_the_layer_keeps_move_with_it() -> None:
    layer: Any = eight_bits(64, 32, torch.float32)
    layer(torch.randn(2, 64))
    assert layer.weight.SCB is None
    move_parts(nn.Sequential(layer), lambda tensor: tensor.to("meta"))
    assert layer.state.SCB.is_meta
    assert layer.state.CB.is_meta
