"""Philox4x32-10 inside kernels: the random bits of gpipe_fast's keyed ops.

The 32-bit words equal those of csrc/random/ (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
2011). Element e, counted in contiguous order, uses word e % 4 of block e / 4::

    Philox key      = key[0], the mini-batch's key
    Philox counter  = ( block, low 32 bits | block, high 32 bits | micro-batch | layer << 16 | ordinal )
    micro-batch     = key[1]
    layer           = key[2] + layer, or 0xFFFF outside of every layer

The kernel reads the key from memory, so a captured graph draws new numbers after the key has changed.

A block of words costs about 100 integer instructions and no memory traffic. If four divides the row length, a
block is generated once for four elements of a thread; otherwise it is generated for each element.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The layer number of random ops outside of every layer.
NO_LAYER = tl.constexpr(0xFFFF)


def last_kept_word(keep: float) -> int:
    """Returns the largest word for which `is_kept` is true, as a signed 32-bit integer.

    Args:
        keep: the probability of a one, rounded to a multiple of 2^-32. The comparison keeps at least one
            word, even with probability 0.
    """
    words = keep * 2.0**32
    kept = int(words) + (words - int(words) >= 0.5)
    last = max(kept, 1) - 1
    return last - (1 << 32 if last >> 31 else 0)


@triton.jit
def four_words(blocks, p_key, layer, ordinal):
    """Returns the four words of each block, as four uint32 tensors.

    ``blocks`` is int64; ``p_key`` points to the key's three int64 numbers.
    """
    microbatch = tl.load(p_key + 1).to(tl.uint32)
    layer = tl.where(layer == NO_LAYER, NO_LAYER, tl.load(p_key + 2) + layer).to(tl.uint32)
    subsequence = (layer << 16) | tl.cast(ordinal, tl.uint32)
    return tl.philox(
        tl.load(p_key), blocks.to(tl.uint32), (blocks >> 32).to(tl.uint32), microbatch, subsequence
    )


@triton.jit
def words_of_blocks(blocks, p_key, layer, ordinal):
    """Returns all words of the blocks, in order: the last dimension is four times that of ``blocks``."""
    first, second, third, fourth = four_words(blocks, p_key, layer, ordinal)
    return tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))


@triton.jit
def words_of_elements(elements, p_key, layer, ordinal):
    """Returns the word of each element, for any alignment to blocks. ``elements`` is int64."""
    first, second, third, fourth = four_words(elements >> 2, p_key, layer, ordinal)
    odd = (elements & 1) == 1
    return tl.where((elements & 2) == 2, tl.where(odd, fourth, third), tl.where(odd, second, first))


@triton.jit
def is_kept(words, last):
    """Returns where ``torch.ops.gpipe_fast.keyed_bernoulli`` draws 1. ``last`` is from `last_kept_word`."""
    return words <= tl.cast(last, tl.uint32, bitcast=True)


@triton.jit
def keep_rows(
    o_rows, first_col, num_cols, p_key, layer, ordinal, last, COLS: tl.constexpr, BY_FOUR: tl.constexpr
):
    """Returns which elements of a tile are kept: COLS columns from ``first_col`` of rows of ``num_cols``.

    With BY_FOUR a block of words is generated once for four elements: four must divide ``num_cols``,
    ``first_col`` and COLS.
    """
    first = o_rows.to(tl.int64)[:, None] * num_cols + first_col
    if BY_FOUR:
        words = words_of_blocks((first >> 2) + tl.arange(0, COLS // 4)[None, :], p_key, layer, ordinal)
    else:
        words = words_of_elements(first + tl.arange(0, COLS)[None, :], p_key, layer, ordinal)
    return is_kept(words, last)
