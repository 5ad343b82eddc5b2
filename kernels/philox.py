"""The random bits of gpipe_fast's keyed ops, drawn inside a kernel: Philox4x32-10.

The words are those of csrc/random/ (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011). Element e, counted in contiguous order, takes word e % 4 of block e / 4::

    Philox key      = key[0], the mini-batch's key
    Philox counter  = ( block, low 32 bits | block, high 32 bits | micro-batch | layer << 16 | ordinal )
    micro-batch     = key[1]
    layer           = key[2] + layer, or 0xFFFF outside of every layer

The key is read from memory by the kernel, so that a captured graph draws anew when the key has changed.

A block of words costs about 100 integer instructions, read or written bytes none. Where blocks begin with the
elements of a thread they are drawn once for four elements; where rows of another length than a multiple of
four keep them from that, each element draws its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels.launch import Config

# What counts as the layer of a random op outside of every layer.
NO_LAYER = tl.constexpr(0xFFFF)
_LIMIT = 1 << 16
# Types of what kernels take for a draw, beside the key.
SIGNATURE = {"layer": "i32", "ordinal": "i32", "last": "i32", "scale": "fp32"}


class Draw(NamedTuple):
    """A dropout, and the place in the model where its mask is drawn.

    Attributes:
        p: probability of a zero.
        key: ``[minibatch_key, microbatch, first_layer]``, int64, on the device where the draw is; in range as
            in csrc/random/random.cpp, which kernels cannot check.
        layer: counted from the key's first layer, or 0xFFFF outside of every layer.
        ordinal: which random op of the layer.
    """

    p: float
    key: Tensor
    layer: int
    ordinal: int

    def numbers(self) -> tuple[int, int, int, float]:
        """What kernels take beside the key: layer, ordinal, the last word that is kept, and the scale."""
        return (self.layer, self.ordinal, *threshold(self.p))

    def check(self, like: Tensor) -> None:
        """Raises ValueError unless a mask for such a tensor can be drawn."""
        check_draw(like, *self)


# What kernels take where nothing is drawn.
NO_NUMBERS = (0, 0, 0, 1.0)


def arguments(draw: Draw | None, stand_in: Tensor) -> tuple[Tensor, tuple[int, int, int, float]]:
    """The key and the numbers that kernels take; where nothing is drawn, what stands for them."""
    return (stand_in, NO_NUMBERS) if draw is None else (draw.key, draw.numbers())


def forms(plain: Iterable[Config], drawing: Config) -> list[tuple[str, int, Config]]:
    """How an elementwise kernel is compiled, without and with dropout: name, `at_once`, configuration."""
    found = [("", 0, config) for config in plain]
    return [*found, (" dropout", 4, drawing), (" dropout odd", 1, drawing)]


def at_once(draw: Draw | None, num_cols: int) -> int:
    """For how many elements of rows of so many columns a kernel draws words at once; 0 if it draws none."""
    return 0 if draw is None else 1 if num_cols % 4 else 4


def threshold(p: float) -> tuple[int, float]:
    """What kernels take for dropout with probability ``p``: the last word that is kept, and the scale.

    Args:
        p: probability of a zero; an element is kept with probability 1 - p, rounded to a multiple of 2^-32.

    Returns:
        The word's 32 bits as a signed integer, and 1 / (1 - p), or 0 where nothing is kept: words cannot say
        that, so the scale does.
    """
    words = (1.0 - p) * 2.0**32
    kept = int(words) + (words - int(words) >= 0.5)
    last = max(kept, 1) - 1
    return last - (1 << 32 if last >> 31 else 0), 1.0 / (1.0 - p) if kept else 0.0


def check_draw(like: Tensor, p: float, key: Tensor, layer: int, ordinal: int) -> None:
    """Raises ValueError unless dropout of ``like`` can be drawn.

    Args:
        like: a tensor on the device where the draw is.
        p: probability of a zero.
        key: ``[minibatch_key, microbatch, first_layer]``, int64, on the same device.
        layer: counted from the key's first layer, or 0xFFFF outside of every layer.
        ordinal: which random op of the layer.
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
    """The four words of each block, as four tensors of uint32.

    Blocks are int64; ``p_key`` points to the key's three int64 numbers.
    """
    microbatch = tl.load(p_key + 1).to(tl.uint32)
    layer = tl.where(layer == NO_LAYER, NO_LAYER, tl.load(p_key + 2) + layer).to(tl.uint32)
    place = (layer << 16) | tl.to_tensor(ordinal).to(tl.uint32)
    return tl.philox(tl.load(p_key), blocks.to(tl.uint32), (blocks >> 32).to(tl.uint32), microbatch, place)


@triton.jit
def words_of_blocks(blocks, p_key, layer, ordinal):
    """The words of whole blocks: the last dimension is that of ``blocks``, times four."""
    first, second, third, fourth = four_words(blocks, p_key, layer, ordinal)
    return tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))


@triton.jit
def words_of_elements(elements, p_key, layer, ordinal):
    """The word of each element, wherever blocks begin; elements are int64."""
    first, second, third, fourth = four_words(elements >> 2, p_key, layer, ordinal)
    odd = (elements & 1) == 1
    return tl.where((elements & 2) == 2, tl.where(odd, fourth, third), tl.where(odd, second, first))


@triton.jit
def keep(words, last):
    """Where ``torch.ops.gpipe_fast.keyed_bernoulli`` gives one; ``last`` is `threshold`'s."""
    return words <= tl.to_tensor(last).to(tl.uint32, bitcast=True)


@triton.jit
def keep_rows(
    o_rows, first_col, num_cols, p_key, layer, ordinal, last, COLS: tl.constexpr, BY_FOUR: tl.constexpr
):
    """Which elements of a tile are kept: COLS columns from ``first_col`` of rows of ``num_cols``.

    With BY_FOUR a block of words is drawn once for four elements: four must divide ``num_cols``,
    ``first_col`` and COLS.
    """
    first = o_rows.to(tl.int64)[:, None] * num_cols + first_col
    if BY_FOUR:
        words = words_of_blocks((first >> 2) + tl.arange(0, COLS // 4)[None, :], p_key, layer, ordinal)
    else:
        words = words_of_elements(first + tl.arange(0, COLS)[None, :], p_key, layer, ordinal)
    return keep(words, last)


@triton.jit
def factor_rows(
    o_rows, first_col, num_cols, p_key, layer, ordinal, last, scale,
    COLS: tl.constexpr, BY_FOUR: tl.constexpr,
):  # fmt: skip
    """What dropout multiplies a tile by: ``scale`` where `keep_rows`, else 0."""
    kept = keep_rows(o_rows, first_col, num_cols, p_key, layer, ordinal, last, COLS, BY_FOUR)
    return tl.where(kept, scale, 0.0)
