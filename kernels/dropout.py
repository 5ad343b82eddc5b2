"""Dropout and residual: ``y = residual + dropout(h)``, the mask drawn again by the key, never stored.

With m of the keyed op, 1 with probability 1 - p (Srivastava et al., "Dropout", JMLR 15, 2014)::

    y = residual + h m / (1 - p)          dh = g m / (1 - p)          dresidual = g

Bytes per element of itemsize i: forward 2 i read, i written; backward i read, i written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels import philox, reference
from gpipe_fast.kernels.launch import Config, Variant, cdiv, launch, runs_kernels, tuned
from gpipe_fast.kernels.philox import Draw

# By how many elements there are: the first that is large enough.
CONFIGS = {1 << 20: Config({"SIZE": 1024}), 1 << 62: Config({"SIZE": 2048})}


def choose(num_elements: int) -> Config:
    """The configuration for so many elements."""
    most = next(size for size in CONFIGS if num_elements <= size)
    return tuned("dropout_add", f"elements<={most}", CONFIGS[most])


# Numbers that vary from call to call of the same form.
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
    # As PyTorch does: what is dropped and not finite stays so.
    y = h * tl.where(philox.keep(words, last), scale, 0.0)
    if HAS_RESIDUAL:
        y += tl.load(p_residual + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_y + offsets, y.to(p_y.dtype.element_ty), mask=mask)


def launch_dropout_add(
    h: Tensor, residual: Tensor | None, p: float, key: Tensor, layer: int, ordinal: int
) -> Tensor:
    """``residual + dropout(h)``, of h's shape and dtype, contiguous."""
    h = h.contiguous()
    y = torch.empty_like(h)
    config = choose(h.numel())
    last, scale = philox.threshold(p)
    tensors = (h, h if residual is None else residual.contiguous(), key, y)
    draw = (layer, ordinal, last, scale)
    grid = (cdiv(h.numel(), config.blocks["SIZE"]),)
    launch(_dropout_add, grid, config, *tensors, h.numel(), *draw, HAS_RESIDUAL=residual is not None)
    return y


def variants() -> dict[str, Variant]:
    """Every configuration, in the forms that are checked without a GPU."""
    found = {}
    small, large = CONFIGS.values()
    for dtype in ("fp32", "bf16"):
        tensors = {**dict.fromkeys(("p_h", "p_residual", "p_y"), f"*{dtype}"), "p_key": "*i64"}
        for config, count in ((small, "i32"), (large, "i32"), (large, "i64")):
            sizes = {"num_elements": count, **philox.SIGNATURE}
            for way, has_residual in (("forward", True), ("backward", False)):
                found[f"dropout_add {way}, {dtype}, {count} elements, {config}"] = Variant(
                    _dropout_add,
                    tensors | sizes,
                    {"HAS_RESIDUAL": has_residual},
                    config,
                    (*tensors, "num_elements"),
                )
    return found


def drop(h: Tensor, residual: Tensor | None, draw: Draw) -> Tensor:
    """``residual + dropout(h)`` by kernel, or by the reference."""
    run = launch_dropout_add if runs_kernels(h, residual, draw.key) else reference.dropout_add
    return run(h, residual, *draw)


@torch.library.triton_op("gpipe_fast::dropout_add", mutates_args={})
def _op(h: Tensor, residual: Tensor | None, p: float, key: Tensor, layer: int, ordinal: int) -> Tensor:
    return drop(h, residual, Draw(p, key, layer, ordinal))


def dropout_add(
    h: Tensor, residual: Tensor | None, p: float, key: Tensor, layer: int, ordinal: int
) -> Tensor:
    """``residual + dropout(h)``: nothing is kept for the backward, which draws the mask again.

    On the CPU the mask is drawn by ``torch.ops.gpipe_fast.keyed_bernoulli``, which gpipe_fast's extension
    registers; on a GPU by the kernel, from the same key the same bits.

    Args:
        h: of any shape; fp32, fp16 or bf16. Computed in fp32.
        residual: of h's shape and dtype, or None for dropout alone.
        p: probability of a zero.
        key: ``[minibatch_key, microbatch, first_layer]``, int64, on h's device; in range as in
            csrc/random/random.cpp, which kernels cannot check.
        layer: counted from the key's first layer, or 0xFFFF outside of every layer.
        ordinal: which random op of the layer.

    Returns:
        A contiguous tensor of h's shape and dtype.

    Raises:
        ValueError: shapes or dtypes do not fit, or no mask can be drawn by such numbers.
        RuntimeError: on the CPU, without gpipe_fast's extension.
    """
    if residual is not None and (residual.shape, residual.dtype) != (h.shape, h.dtype):
        raise ValueError(
            f"the residual must be {h.dtype} of shape {list(h.shape)}, got {residual.dtype} of shape "
            f"{list(residual.shape)}"
        )
    philox.check_draw(h, p, key, layer, ordinal)
    result: Tensor = _op(h, residual, p, key, layer, ordinal)
    return result


def _setup(ctx, inputs, output):
    _, residual, ctx.p, key, ctx.layer, ctx.ordinal = inputs
    ctx.save_for_backward(key)
    ctx.has_residual = residual is not None


def _differentiate(ctx, g):
    (key,) = ctx.saved_tensors
    dh = _op(g, None, ctx.p, key, ctx.layer, ctx.ordinal) if ctx.needs_input_grad[0] else None
    return dh, g if ctx.has_residual else None, None, None, None, None


_op.register_autograd(_differentiate, setup_context=_setup)
