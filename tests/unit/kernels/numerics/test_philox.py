"""Random bits drawn inside kernels, against gpipe_fast's keyed operators."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels import philox
from gpipe_fast.kernels.launch import cdiv
from gpipe_fast.randomness.random import NO_LAYER, make_key
from tests.unit.kernels.numerics.comparison import DEVICE, every_width, needs_kernels

pytestmark = needs_kernels

ops = torch.ops.gpipe_fast
KEYS = [(0, 0, 0), (-(2**63), 2**32 - 1, 0), (0x0123456789ABCDEF, 7, 12), (-1, 1, 65000)]
LAYERS_AND_ORDINALS = [(0, 0), (1, 1), (5, 9), (535, 0xFFFF), (NO_LAYER, 3)]
ROWS = 4


@triton.jit
def _words_kernel(p_words, p_key, first, layer, ordinal, SIZE: tl.constexpr, BY_FOUR: tl.constexpr):
    first = first.to(tl.int64)
    if BY_FOUR:
        words = philox.words_of_blocks((first >> 2) + tl.arange(0, SIZE // 4), p_key, layer, ordinal)
    else:
        words = philox.words_of_elements(first + tl.arange(0, SIZE), p_key, layer, ordinal)
    tl.store(p_words + tl.arange(0, SIZE), words.to(tl.int64))


@triton.jit
def _mask_kernel(
    p_kept, p_key, num_rows, num_cols, layer, ordinal, last,
    ROWS: tl.constexpr, COLS: tl.constexpr, BY_FOUR: tl.constexpr,
):  # fmt: skip
    o_rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first_col = tl.program_id(0) * COLS
    kept = philox.keep_rows(o_rows, first_col, num_cols, p_key, layer, ordinal, last, COLS, BY_FOUR)
    o_cols = first_col + tl.arange(0, COLS)
    mask = (o_rows < num_rows)[:, None] & (o_cols < num_cols)[None, :]
    tl.store(p_kept + o_rows[:, None] * num_cols + o_cols[None, :], kept.to(tl.int8), mask=mask)


def kernel_mask(num_rows: int, num_cols: int, p: float, key: Tensor, layer: int, ordinal: int) -> Tensor:
    """Returns the kernel's mask, drawn by element and, where possible, also by block; both must be equal."""
    last, key = philox.last_kept_word(1.0 - p), key.to(DEVICE)
    # Few blocks, but more than one: the interpreter's time depends only on their number.
    block_cols = 64 if num_cols <= 100 else 512
    masks = []
    for by_four in (False, True)[: 1 + (num_cols % 4 == 0)]:
        out = torch.full((num_rows, num_cols), -1, dtype=torch.int8)
        grid = (cdiv(num_cols, block_cols), cdiv(num_rows, ROWS))
        _mask_kernel[grid](out, key, num_rows, num_cols, layer, ordinal, last, ROWS, block_cols, by_four)
        masks.append(out)
    assert torch.equal(masks[0], masks[-1])
    return masks[0]


def keyed_op_mask(num_rows: int, num_cols: int, p: float, key: Tensor, layer: int, ordinal: int) -> Tensor:
    size = (num_rows, num_cols)
    device = torch.device("cpu")
    return ops.keyed_bernoulli(key, layer, ordinal, size, 1.0 - p, dtype=torch.int8, device=device).to(DEVICE)


@every_width
@pytest.mark.parametrize("num_rows", [1, 7])
def test_kernel_masks_equal_the_masks_of_the_keyed_operator(num_rows: int, cols: int) -> None:
    for at, (key, layer_and_ordinal) in enumerate(
        zip((make_key(*k) for k in KEYS), LAYERS_AND_ORDINALS, strict=False)
    ):
        arguments = (num_rows, cols, (0.1, 0.5, 0.9, 1 / 3)[at], key, *layer_and_ordinal)
        assert torch.equal(kernel_mask(*arguments), keyed_op_mask(*arguments))


@pytest.mark.parametrize("layer_and_ordinal", LAYERS_AND_ORDINALS)
def test_every_key_layer_and_ordinal_has_its_own_mask(layer_and_ordinal: tuple[int, int]) -> None:
    key, (layer, ordinal) = (0x0123456789ABCDEF, 7, 12), layer_and_ordinal
    arguments = (3, 100, 0.5, make_key(*key), layer, ordinal)
    ours = kernel_mask(*arguments)
    assert torch.equal(ours, keyed_op_mask(*arguments))
    others = [(make_key(key[0] ^ 1, *key[1:]), layer, ordinal), (arguments[3], layer, ordinal ^ 1)]
    assert all(not torch.equal(ours, kernel_mask(3, 100, 0.5, *other)) for other in others)


@pytest.mark.parametrize("p", [0.0, 2.0**-33, 2.0**-32, 0.25, 0.5, 1 - 2.0**-31, 1 - 2.0**-32])
def test_kernels_round_the_probability_like_the_keyed_operator(p: float) -> None:
    key = make_key(42, 0)
    assert torch.equal(kernel_mask(1, 1000, p, key, 0, 0), keyed_op_mask(1, 1000, p, key, 0, 0))


@pytest.mark.parametrize("first", [0, 4, 2**31 - 64, 2**33 - 32, 2**34, 2**34 + 1000, 2**61])
@pytest.mark.parametrize("by_four", [True, False])
def test_random_words_of_elements_with_large_indices_equal_philox(first: int, by_four: bool) -> None:
    key, size = make_key(-3, 5, 2), 128
    out = torch.empty(size, dtype=torch.int64)
    _words_kernel[(1,)](out, key.to(DEVICE), first, 4, 6, size, by_four)
    blocks = range(first // 4, (first + size) // 4)
    words = [ops.philox_block(-3, [b & 0xFFFFFFFF, b >> 32, 5, (2 + 4) << 16 | 6]) for b in blocks]
    assert torch.equal(out.cpu(), torch.cat(words))
