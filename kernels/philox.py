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

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels.launch import Config

# The layer number of random ops outside of every layer.
NO_LAYER = tl.constexpr(0xFFFF)
_LIMIT = 1 << 16
# Types of a kernel's dropout arguments, except the key.
SIGNATURE = {"layer": "i32", "ordinal": "i32", "last": "i32", "scale": "fp32"}


class Draw(NamedTuple):
    """A dropout: its probability, and the key and position in the model that determine its mask.

    Attributes:
        p: the probability of a zero.
        key: the int64 tensor ``[minibatch_key, microbatch, first_layer]`` on the device of the dropout. Its
            values must be in the ranges that csrc/random/random.cpp checks; kernels cannot check them.
        layer: the layer, counted from the key's first layer, or 0xFFFF outside of every layer.
        ordinal: the index of the random op within the layer.
    """

    p: float
    key: Tensor
    layer: int
    ordinal: int

    def numbers(self) -> tuple[int, int, int, float]:
        """Returns the kernel arguments except the key: layer, ordinal, the largest kept word, the scale."""
        return (self.layer, self.ordinal, *keep_threshold(self.p))

    def check(self, like: Tensor) -> None:
        """Raises ValueError unless this dropout applies to ``like``; see `check_draw`."""
        check_draw(like, *self)


# Kernel arguments without dropout.
NO_DROPOUT_ARGUMENTS = (0, 0, 0, 1.0)


def arguments(draw: Draw | None, placeholder: Tensor) -> tuple[Tensor, tuple[int, int, int, float]]:
    """Returns the kernel arguments of a dropout: key and numbers, or placeholders if ``draw`` is None."""
    return (placeholder, NO_DROPOUT_ARGUMENTS) if draw is None else (draw.key, draw.numbers())


def dropout_variants(plain: Iterable[Config], drawing: Config) -> list[tuple[str, int, Config]]:
    """Returns an elementwise kernel's forms without and with dropout: name, block elements, configuration."""
    found = [("", 0, config) for config in plain]
    return [*found, (" dropout", 4, drawing), (" dropout odd", 1, drawing)]


def tensor_types(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any]) -> dict[str, str]:
    """Returns the type of each tensor of a variant: its own in ``types``, or the one named 'p_'."""
    names = [name for name in kernel.arg_names if name.startswith("p_")]
    found = {name: f"*{types.get(name, types['p_'])}" for name in names}
    return found | ({"p_key": "*i64"} if constants["DROPOUT"] else {})


def aligned(tensors: Iterable[str], constants: Mapping[str, Any], *sizes: str) -> tuple[str, ...]:
    """Returns the arguments of a variant that are divisible by 16: all tensors but a key, and the row length.

    Keys lie 24 bytes apart. Dropout that generates a block of words for each element is for rows of odd
    lengths.
    """
    odd = constants["DROPOUT"] == 1
    return (*(t for t in tensors if t != "p_key"), *(() if odd else sizes))


def elements_per_block(draw: Draw | None, num_cols: int) -> int:
    """Returns how many elements share one block of words: 4 or 1, by the row length; 0 without dropout."""
    return 0 if draw is None else 1 if num_cols % 4 else 4


def keep_threshold(p: float) -> tuple[int, float]:
    """Returns a kernel's arguments for dropout with probability ``p``: the largest kept word and the scale.

    Args:
        p: the probability of a zero. An element is kept with probability 1 - p, rounded to a multiple of
            2^-32.

    Returns:
        The 32 bits of the word as a signed integer, and the scale 1 / (1 - p). If nothing is kept the scale
        is 0, because the comparison with the word keeps at least one value.
    """
    return kept_words(1.0 - p, 1.0 / (1.0 - p) if p < 1.0 else 0.0)


def kept_words(keep: float, scale: float) -> tuple[int, float]:
    """Returns a kernel's arguments like `keep_threshold`, for a probability of a one and a factor of ones."""
    words = keep * 2.0**32
    kept = int(words) + (words - int(words) >= 0.5)
    last = max(kept, 1) - 1
    return last - (1 << 32 if last >> 31 else 0), scale if kept else 0.0


def check_draw(like: Tensor, p: float, key: Tensor, layer: int, ordinal: int) -> None:
    """Raises ValueError unless these are valid dropout arguments for ``like``.

    Args:
        like: a tensor on the device of the dropout.
        p: the probability of a zero.
        key: the int64 tensor ``[minibatch_key, microbatch, first_layer]`` on the same device.
        layer: the layer, counted from the key's first layer, or 0xFFFF outside of every layer.
        ordinal: the index of the random op within the layer.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p must be in [0, 1], but got {p}")
    if key.dtype != torch.int64 or key.shape != (3,) or not key.is_contiguous():
        raise ValueError(
            "key must be a contiguous int64 tensor [minibatch_key, microbatch, first_layer], but got "
            f"{key.dtype} of shape {list(key.shape)}"
        )
    if key.device != like.device:
        raise ValueError(f"key must be on {like.device}, but is on {key.device}")
    if not 0 <= layer < _LIMIT:
        raise ValueError(f"layer must fit 16 bits, but got {layer}")
    if not 0 <= ordinal < _LIMIT:
        raise ValueError(f"a layer may hold at most 65536 random ops, but got ordinal {ordinal}")


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
    """Returns where ``torch.ops.gpipe_fast.keyed_bernoulli`` draws 1. ``last`` is from `keep_threshold`."""
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


@triton.jit
def factor_rows(
    o_rows, first_col, num_cols, p_key, layer, ordinal, last, scale,
    COLS: tl.constexpr, BY_FOUR: tl.constexpr,
):  # fmt: skip
    """Returns dropout's factor for each element of a tile: ``scale`` where `keep_rows` is true, else 0."""
    kept = keep_rows(o_rows, first_col, num_cols, p_key, layer, ordinal, last, COLS, BY_FOUR)
    return tl.where(kept, scale, 0.0)
