"""Dropout and residual, ``y = residual + dropout(h)``. The mask is regenerated from the key, never stored.

The mask m is drawn by the keyed op and is 1 with probability 1 - p (Srivastava et al., "Dropout", JMLR 15,
2014)::

    y = residual + h m / (1 - p)          dh = g m / (1 - p)          dresidual = g

Each tensor may have its own dtype. Memory traffic per element of itemsize i: the forward reads 2 i bytes and
writes i; the backward reads i and writes i.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels import philox, reference
from gpipe_fast.kernels.launch import Config, Variant, cdiv, launch, tuned, uses_kernels
from gpipe_fast.kernels.philox import Draw

# Configurations by the maximum number of elements; the first entry that is large enough applies.
CONFIGS = {1 << 20: Config({"SIZE": 1024}), 1 << 62: Config({"SIZE": 2048})}


def choose(num_elements: int) -> Config:
    """Returns the configuration for ``num_elements`` elements."""
    max_elements = next(size for size in CONFIGS if num_elements <= size)
    return tuned("dropout_add", f"elements<={max_elements}", CONFIGS[max_elements])


# Values that differ between dropout layers must not trigger a recompilation.
@triton.jit(do_not_specialize=["layer", "ordinal", "last"])
def _dropout_add(
    p_h, p_residual, p_key, p_y, num_elements, layer, ordinal, last, scale,
    HAS_RESIDUAL: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * SIZE
    offsets = first + tl.arange(0, SIZE)
    mask = offsets < num_elements
    words = philox.words_of_blocks((first >> 2) + tl.arange(0, SIZE // 4), p_key, layer, ordinal)
    h = tl.load(p_h + offsets, mask=mask, other=0.0).to(tl.float32)
    # Multiplies by 0, as PyTorch does: a dropped infinity or NaN becomes NaN.
    y = h * tl.where(philox.is_kept(words, last), scale, 0.0)
    if HAS_RESIDUAL:
        y += tl.load(p_residual + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_y + offsets, y.to(p_y.dtype.element_ty), mask=mask)


def launch_dropout_add(
    h: Tensor, residual: Tensor | None, draw: Draw, *, y_dtype: torch.dtype | None = None
) -> Tensor:
    """Computes ``residual + dropout(h)``: a contiguous tensor of h's shape.

    Without a residual and with the gradient in h's place, this is also the backward.

    Args:
        h: a tensor of any shape.
        residual: a tensor of h's shape, or None.
        draw: the mask, indexed by h's elements in contiguous order.
        y_dtype: dtype of the result. Default: the dtype of ``residual + h``.
    """
    h = h.contiguous()
    sum_dtype = h.dtype if residual is None else torch.promote_types(h.dtype, residual.dtype)
    y = torch.empty_like(h, dtype=y_dtype or sum_dtype)
    config = choose(h.numel())
    tensors = (h, h if residual is None else residual.contiguous(), draw.key, y)
    grid = (cdiv(h.numel(), config.blocks["SIZE"]),)
    numbers = (h.numel(), *draw.numbers())
    launch(_dropout_add, grid, config, *tensors, *numbers, HAS_RESIDUAL=residual is not None)
    return y


def variants() -> dict[str, Variant]:
    """Returns every configuration in the variants that are checked without a GPU."""
    found = {}
    small, large = CONFIGS.values()
    mixes = {
        "fp32": {"p_": "fp32"},
        "bf16": {"p_": "bf16"},
        "autocast": {"p_": "bf16", "p_residual": "fp32", "p_y": "fp32"},
    }
    for mix, types in mixes.items():
        tensors = philox.tensor_types(_dropout_add, types, {"DROPOUT": 4})
        for config, count in ((small, "i32"), (large, "i32"), (large, "i64")):
            signature = tensors | {"num_elements": count, **philox.SIGNATURE}
            aligned = philox.aligned(tensors, {"DROPOUT": 4}, "num_elements")
            for direction, has_residual in (("forward", True), ("backward", False)):
                found[f"dropout_add {direction}, {mix}, {count} elements, {config}"] = Variant(
                    _dropout_add, signature, {"HAS_RESIDUAL": has_residual}, config, aligned
                )
    return found


def dropout_add_forward(h: Tensor, residual: Tensor | None, draw: Draw) -> Tensor:
    """Computes ``residual + dropout(h)`` with the kernel or with the reference."""
    if uses_kernels(h, residual, draw.key):
        return launch_dropout_add(h, residual, draw)
    return reference.dropout_add(h, residual, *draw)


@torch.library.triton_op("gpipe_fast::dropout_add", mutates_args={})
def _dropout_add_op(
    h: Tensor, residual: Tensor | None, p: float, key: Tensor, layer: int, ordinal: int
) -> Tensor:
    return dropout_add_forward(h, residual, Draw(p, key, layer, ordinal))


def dropout_add(
    h: Tensor, residual: Tensor | None, p: float, key: Tensor, layer: int, ordinal: int
) -> Tensor:
    """Computes ``residual + dropout(h)``. Saves only the key: the backward regenerates the mask.

    On the CPU ``torch.ops.gpipe_fast.keyed_bernoulli`` of gpipe_fast's extension draws the mask, on a GPU the
    kernel does; the same key gives the same bits.

    Args:
        h: a tensor of any shape; fp32, fp16 or bf16. Arithmetic is in fp32.
        residual: a tensor of h's shape and dtype, or None for dropout alone.
        p: the probability of a zero.
        key: the int64 tensor ``[minibatch_key, microbatch, first_layer]`` on h's device. Its values must be
            in the ranges that csrc/random/random.cpp checks; kernels cannot check them.
        layer: the layer, counted from the key's first layer, or 0xFFFF outside of every layer.
        ordinal: the index of the random op within the layer.

    Returns:
        A contiguous tensor of h's shape and dtype.

    Raises:
        ValueError: shapes or dtypes do not match, or p, key, layer or ordinal is invalid.
        RuntimeError: h is on the CPU and gpipe_fast's extension is not loaded.
    """
    if residual is not None and (residual.shape, residual.dtype) != (h.shape, h.dtype):
        raise ValueError(
            f"the residual must be {h.dtype} of shape {list(h.shape)}, got {residual.dtype} of shape "
            f"{list(residual.shape)}"
        )
    philox.check_draw(h, p, key, layer, ordinal)
    result: Tensor = _dropout_add_op(h, residual, p, key, layer, ordinal)
    return result


def _setup(ctx, inputs, output):
    _, residual, ctx.p, key, ctx.layer, ctx.ordinal = inputs
    ctx.save_for_backward(key)
    ctx.has_residual = residual is not None


def _differentiate(ctx, g):
    (key,) = ctx.saved_tensors
    dh = _dropout_add_op(g, None, ctx.p, key, ctx.layer, ctx.ordinal) if ctx.needs_input_grad[0] else None
    return dh, g if ctx.has_residual else None, None, None, None, None


_dropout_add_op.register_autograd(_differentiate, setup_context=_setup)
