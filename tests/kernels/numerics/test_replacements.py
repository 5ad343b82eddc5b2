"""The launchers of activations that replace nodes of stages, against the operators that they replace."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gpipe_fast.fuse.families import activations, gated, stacks
from gpipe_fast.fuse.launchers import CannotLaunch
from gpipe_fast.fuse.patterns import NUMBERS
from gpipe_fast.fuse.spellings import RELU, SILU, SPELLINGS, Spelling
from gpipe_fast.kernels.launch import Config, override_config
from gpipe_fast.randomness.random import make_key
from tests.kernels.numerics.comparison import check, needs_kernels, to_float64

FP16, FP32 = torch.float16, torch.float32
# The dtype of powers and the dtype of linear layers; the last one is that of autocast.
MIXES = ((FP32, FP32), (FP16, FP16), (FP32, FP16))

# Patterns have few columns: of so few elements, the largest error says little.
COLUMNS = 700
# The interpreter takes as long for a large block as for a small one.
BLOCKS = Config({"ROWS": 8, "COLS": 1024})
CONFIGURED = (
    ("bias_activation", f"cols<={1 << 62}"),
    ("bias_activation_dropout", "cols"),
    ("gated_activation", f"cols<={1 << 62}"),
    ("gated_activation_dropout", "cols"),
)

every_spelling = pytest.mark.parametrize(
    "spelling", SPELLINGS, ids=lambda s: s.activation + " spelled" * (not s.is_operator)
)


@pytest.fixture(autouse=True)
def large_blocks_and_many_columns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes patterns have many columns, and kernels process many rows in one program."""
    monkeypatch.setattr(activations, "COLUMNS", COLUMNS)
    monkeypatch.setattr(gated, "COLUMNS", COLUMNS)
    with contextlib.ExitStack() as stack:
        for kernel, shape_class in CONFIGURED:
            stack.enter_context(override_config(kernel, shape_class, BLOCKS))
        yield


def compare_with_operators(replacement: Any) -> None:
    """Compares a replacement's launcher with its pattern, for many columns."""
    replacement = dataclasses.replace(replacement, shape=(*replacement.shape[:-1], COLUMNS))
    inputs = [
        make_key(7, 2) if dtype == torch.int64 else 2 * torch.randn(shape).to(dtype)
        for shape, dtype in replacement.case().arguments
    ]
    numbers = {name: number for number, name in NUMBERS.items()}
    exact = _in_float64(replacement).pattern(*to_float64(inputs))
    check(replacement.launch(numbers, *inputs), replacement.pattern(*inputs), exact)


def _in_float64(replacement: Any) -> Any:
    dtypes = {f.name for f in dataclasses.fields(replacement)} & {"stream", "own", "dtype"}
    return dataclasses.replace(replacement, **dict.fromkeys(dtypes, torch.float64))


def _replacements(family: Any, spelling: Spelling) -> list[Any]:
    every = [case.pattern.__self__ for mix in MIXES for case in family.cases(*mix)]
    return [r for r in every if r.spelling is spelling and not isinstance(r, activations.ImageBackward)]


@needs_kernels
@every_spelling
def test_activations_compute_what_they_replace(spelling: Spelling) -> None:
    found = _replacements(activations, spelling)
    assert len(found) >= 32
    for replacement in found:
        compare_with_operators(replacement)


@needs_kernels
@every_spelling
def test_gated_activations_compute_what_they_replace(spelling: Spelling) -> None:
    found = _replacements(gated, spelling)
    assert len(found) == 72
    for replacement in found:
        compare_with_operators(replacement)


@needs_kernels
@pytest.mark.parametrize("spelling", [RELU, SILU])
def test_gradients_of_images_are_computed_in_the_order_of_memory(spelling: Spelling) -> None:
    z, g = torch.randn(2, 2, 32, 8, 8).to(memory_format=torch.channels_last_3d).unbind(1)
    z, g = (t.contiguous(memory_format=torch.channels_last) for t in (z, g))
    found = activations.ImageBackward(spelling, FP32, True)
    exact = activations.ImageBackward(spelling, torch.float64, True)
    results = found.launch({}, z, g)
    check(results, found.pattern(z, g), exact.pattern(*to_float64([z, g])))
    assert all(t.stride() == z.stride() for t in results)
    with pytest.raises(CannotLaunch):
        found.launch({}, z, g.contiguous())


@pytest.mark.parametrize("packing", stacks.PACKINGS, ids=lambda packing: packing.name)
def test_one_concatenation_has_the_bits_of_the_gradients(packing: stacks.Packing) -> None:
    parts = [torch.randn(packing.shape) for _ in range(3)]
    (expected,) = packing.pattern(*parts)
    assert expected.shape == packing.packed
    # In memory, gradients of attention have heads before the last dimension.
    strided: list[Tensor] = [p.transpose(1, 2).contiguous().transpose(1, 2) for p in parts]
    for inputs in (parts, strided):
        (found,) = packing.launch({}, *inputs)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


@needs_kernels
@pytest.mark.parametrize("packing", [*stacks.PACKINGS, stacks.SPLIT], ids=lambda packing: packing.name)
def test_one_kernel_concatenates_the_gradients_and_sums_the_columns(packing: stacks.Packing) -> None:
    for dtype in (FP32, FP16):
        parts = [torch.randn(packing.shape).to(dtype) for _ in range(3)]
        expected = packing.pattern_with_sums(*parts)
        exact = packing.pattern_with_sums(*to_float64(parts))
        strided: list[Tensor] = [p.transpose(0, -1).contiguous().transpose(0, -1) for p in parts]
        for inputs in (parts, strided):
            found = packing.launch_with_sums({}, *inputs)
            check(found, expected, exact)
            assert torch.equal(found[0], expected[0])
            assert found[0].stride() == expected[0].stride()
