"""Bias and activation: a fused kernel for the backward of a recomputed segment.

For ``a = act(x)``, ``x = z + b``, with the recomputed product z and the gradient g of a, one pass reads z and
g and writes what the adjacent layers need: a for the gradient of the next weight, ``dz = g act'(x)`` for the
product, and sums of dz over rows for the bias. Phi and phi are the cumulative distribution and the density of
the standard normal distribution, s is the logistic function::

    relu       max(0, x)   1 if x > 0, else 0
    silu       x s(x)      s(x) (1 + x (1 - s(x)))
    gelu       x Phi(x)    Phi(x) + x phi(x)                                     (arXiv 1606.08415)
    gelu_tanh  x s(2 u)    s(2 u) + 2 x s(2 u) (1 - s(2 u)) u',  u = sqrt(2 / pi) (x + 0.044715 x^3)

Dropout after the activation, ``a = m act(x) / (1 - p)``, is fused into the same passes; its mask m is
generated from the key (kernels/philox.py). The output a is then taken after dropout, and dz includes the
mask's factor.

Memory traffic per element of itemsize i: the forward reads i bytes and writes i; the backward reads 2 i and
writes 2 i, or i if a is not requested. Bias and sums move bytes per column only.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels import philox, reference
from gpipe_fast.kernels.launch import (
    Config,
    Variant,
    cdiv,
    flatten_rows,
    launch,
    tuned,
    uses_kernels,
)
from gpipe_fast.kernels.philox import Draw

ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")
# Programs that share the rows of one block of columns. Each writes a partial sum; PyTorch adds the partial
# sums.
ROW_PROGRAMS = 128

# Configurations by the maximum number of columns; the first entry that is wide enough applies.
CONFIGS = {
    64: Config({"ROWS": 32, "COLS": 64}),
    512: Config({"ROWS": 8, "COLS": 256}),
    1 << 62: Config({"ROWS": 4, "COLS": 512}),
}

# The configuration for any width with dropout: hidden layers are wide, and random bits take registers.
DROPOUT_CONFIG = Config({"ROWS": 2, "COLS": 512})


def choose(num_cols: int, dropout: bool = False) -> Config:
    """Returns the configuration for rows of ``num_cols`` columns."""
    if dropout:
        return tuned("bias_activation_dropout", "cols", DROPOUT_CONFIG)
    widest = next(width for width in CONFIGS if num_cols <= width)
    return tuned("bias_activation", f"cols<={widest}", CONFIGS[widest])


@triton.jit
def _gelu_tanh_argument(x):
    return 1.5957691216057308 * (x + 0.044715 * x * x * x)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Computes act(x) in fp32."""
    if ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    elif ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        y = x * tl.sigmoid(_gelu_tanh_argument(x))
    return y


@triton.jit
def activation_derivative(x, ACTIVATION: tl.constexpr):
    """Computes act'(x) in fp32. 1 - s(v) is computed as s(-v), which does not cancel where s(v) is near 1."""
    if ACTIVATION == "relu":
        y = tl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "silu":
        y = tl.sigmoid(x) * (1.0 + x * tl.sigmoid(-x))
    elif ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        y = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
    else:
        v = _gelu_tanh_argument(x)
        y = tl.sigmoid(v) * (1.0 + x * tl.sigmoid(-v) * 1.5957691216057308 * (1.0 + 0.134145 * x * x))
    return y


# Values that differ between dropout layers must not trigger a recompilation.
@triton.jit(do_not_specialize=["layer", "ordinal", "last"])
def _forward(
    p_z, p_bias, p_key, p_a, num_rows, num_cols, layer, ordinal, last, scale,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    col_blocks = tl.cdiv(num_cols, COLS)
    first_col = tl.program_id(0) % col_blocks * COLS
    o_cols = first_col + tl.arange(0, COLS)
    o_rows = tl.program_id(0) // col_blocks * ROWS + tl.arange(0, ROWS)
    mask = (o_rows < num_rows)[:, None] & (o_cols < num_cols)[None, :]
    offsets = o_rows.to(tl.int64)[:, None] * num_cols + o_cols[None, :]
    x = tl.load(p_z + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(p_bias + o_cols, mask=o_cols < num_cols, other=0.0).to(tl.float32)[None, :]
    a = activate(x, ACTIVATION)
    if DROPOUT:
        a *= philox.factor_rows(
            o_rows, first_col, num_cols, p_key, layer, ordinal, last, scale, COLS, DROPOUT == 4
        )
    tl.store(p_a + offsets, a.to(p_a.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["layer", "ordinal", "last"])
def _backward(
    p_z, p_bias, p_g, p_key, p_a, p_dz, p_sums, num_rows, num_cols, layer, ordinal, last, scale,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, WITH_A: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    first_col = tl.program_id(0) * COLS
    o_cols = first_col + tl.arange(0, COLS)
    m_cols = o_cols < num_cols
    b_sums = tl.zeros([COLS], tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(p_bias + o_cols, mask=m_cols, other=0.0).to(tl.float32)[None, :]
    for first_row in range(tl.program_id(1) * ROWS, num_rows, tl.num_programs(1) * ROWS):
        o_rows = first_row + tl.arange(0, ROWS)
        mask = (o_rows < num_rows)[:, None] & m_cols[None, :]
        offsets = o_rows.to(tl.int64)[:, None] * num_cols + o_cols[None, :]
        x = tl.load(p_z + offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += b_bias
        g = tl.load(p_g + offsets, mask=mask, other=0.0).to(tl.float32)
        a = activate(x, ACTIVATION)
        if DROPOUT:
            factor = philox.factor_rows(
                o_rows, first_col, num_cols, p_key, layer, ordinal, last, scale, COLS, DROPOUT == 4
            )
            a *= factor
            g *= factor
        dz = g * activation_derivative(x, ACTIVATION)
        if WITH_A:
            tl.store(p_a + offsets, a.to(p_a.dtype.element_ty), mask=mask)
        tl.store(p_dz + offsets, dz.to(p_dz.dtype.element_ty), mask=mask)
        if HAS_BIAS:
            b_sums += tl.sum(dz, axis=0)
    if HAS_BIAS:
        tl.store(p_sums + tl.program_id(1) * num_cols + o_cols, b_sums, mask=m_cols)


def _constants(num_cols: int, has_bias: bool, activation: str, draw: Draw | None) -> dict[str, Any]:
    return {
        "ACTIVATION": activation,
        "HAS_BIAS": has_bias,
        "DROPOUT": philox.elements_per_block(draw, num_cols),
    }


def launch_forward(z: Tensor, bias: Tensor | None, activation: str, draw: Draw | None = None) -> Tensor:
    """Computes ``dropout(act(z + bias))`` in z's shape and dtype."""
    rows = flatten_rows(z)
    num_rows, num_cols = rows.shape
    config = choose(num_cols, draw is not None)
    a = torch.empty_like(rows)
    # A one-dimensional grid, because CUDA limits the other grid dimensions to 65535.
    grid = (cdiv(num_cols, config.blocks["COLS"]) * cdiv(num_rows, config.blocks["ROWS"]),)
    key, numbers = philox.arguments(draw, rows)
    tensors = (rows, rows if bias is None else bias.contiguous(), key, a)
    constants = _constants(num_cols, bias is not None, activation, draw)
    launch(_forward, grid, config, *tensors, num_rows, num_cols, *numbers, **constants)
    return a.view(z.shape)


def launch_backward(
    z: Tensor, bias: Tensor | None, g: Tensor, activation: str, with_a: bool, draw: Draw | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the activation (empty unless ``with_a``), the gradient of z and the bias gradient (or None)."""
    rows, g_rows = flatten_rows(z), flatten_rows(g)
    num_rows, num_cols = rows.shape
    config = choose(num_cols, draw is not None)
    a, dz = z.new_empty(z.shape if with_a else (0,)), torch.empty_like(rows)
    row_programs = min(ROW_PROGRAMS, cdiv(num_rows, config.blocks["ROWS"]))
    sums = torch.empty(
        row_programs if bias is not None else 0, num_cols, dtype=torch.float32, device=z.device
    )
    grid = (cdiv(num_cols, config.blocks["COLS"]), row_programs)
    key, numbers = philox.arguments(draw, rows)
    tensors = (rows, rows if bias is None else bias.contiguous(), g_rows, key, a, dz, sums)
    constants = _constants(num_cols, bias is not None, activation, draw) | {"WITH_A": with_a}
    launch(_backward, grid, config, *tensors, num_rows, num_cols, *numbers, **constants)
    dbias = None if bias is None else sums.sum(0).to(bias.dtype)
    return a, dz.view(z.shape), dbias


def variants() -> dict[str, Variant]:
    """Returns every configuration in the variants that are checked without a GPU."""
    found = {}
    sizes = {"num_rows": "i32", "num_cols": "i32", **philox.SIGNATURE}
    dropout_variants = philox.dropout_variants(CONFIGS.values(), DROPOUT_CONFIG)
    every = itertools.product(("fp32", "bf16"), ACTIVATIONS, dropout_variants)
    for dtype, activation, (dropout, elements_per_block, config) in every:
        constants = {"ACTIVATION": activation, "HAS_BIAS": True, "DROPOUT": elements_per_block}
        key = {"p_key": "*i64" if elements_per_block else f"*{dtype}"}
        name = f"{activation}{dropout} {dtype}, {config}"
        tensors = {**dict.fromkeys(("p_z", "p_bias", "p_a"), f"*{dtype}"), **key}
        aligned = () if elements_per_block == 1 else ("num_cols",)
        found[f"bias_activation forward, {name}"] = Variant(
            _forward, tensors | sizes, constants, config, (*tensors, *aligned)
        )
        tensors = {**dict.fromkeys(("p_z", "p_bias", "p_g", "p_a", "p_dz"), f"*{dtype}"), **key}
        tensors["p_sums"] = "*fp32"
        for with_a in (True, False):
            direction = "backward" if with_a else "backward gradient alone"
            found[f"bias_activation {direction}, {name}"] = Variant(
                _backward, tensors | sizes, constants | {"WITH_A": with_a}, config, (*tensors, *aligned)
            )
    return found


# Operator schemas have no `Draw` type: its fields are separate arguments, and key=None means no dropout.
@torch.library.triton_op("gpipe_fast::bias_activation", mutates_args={})
def _bias_activation(
    z: Tensor,
    bias: Tensor | None,
    activation: str,
    p: float = 0.0,
    key: Tensor | None = None,
    layer: int = 0,
    ordinal: int = 0,
) -> Tensor:
    draw = None if key is None else Draw(p, key, layer, ordinal)
    forward = launch_forward if uses_kernels(z, bias, key) else reference.bias_activation
    return forward(z, bias, activation, draw)


@torch.library.triton_op("gpipe_fast::bias_activation_backward", mutates_args={})
def _bias_activation_backward(
    z: Tensor,
    bias: Tensor | None,
    g: Tensor,
    activation: str,
    with_a: bool,
    p: float = 0.0,
    key: Tensor | None = None,
    layer: int = 0,
    ordinal: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    draw = None if key is None else Draw(p, key, layer, ordinal)
    backward = launch_backward if uses_kernels(z, bias, g, key) else reference.bias_activation_backward
    a, dz, dbias = backward(z, bias, g, activation, with_a, draw)
    return a, dz, z.new_empty(0) if dbias is None else dbias


def bias_activation_backward(
    z: Tensor, bias: Tensor | None, g: Tensor, activation: str, dropout: Draw | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes the output and the gradients of a recomputed ``dropout(act(z + bias))`` in one pass.

    Args:
        z: the recomputed product, of shape (..., columns).
        bias: a tensor of shape (columns,), or None.
        g: the gradient of the output, of z's shape.
        activation: one of 'relu', 'silu', 'gelu' and 'gelu_tanh'.
        dropout: dropout after the activation, indexed by the elements of z in contiguous order; or None.

    Returns:
        The output, the gradient of z, and the gradient of the bias (None without a bias).

    Raises:
        ValueError: the activation is unknown, shapes do not match, or the dropout arguments are invalid.
        RuntimeError: dropout runs on the CPU and gpipe_fast's extension is not loaded.
    """
    _check(z, bias, activation, dropout)
    if g.shape != z.shape:
        raise ValueError(f"the gradient must be of shape {list(z.shape)}, got {list(g.shape)}")
    a, dz, dbias = _bias_activation_backward(z, bias, g, activation, True, *(dropout or ()))
    return a, dz, None if bias is None else dbias


def bias_activation(
    z: Tensor, bias: Tensor | None = None, activation: str = "gelu", dropout: Draw | None = None
) -> Tensor:
    """Computes ``dropout(act(z + bias))``. Saves only the inputs: the backward recomputes the rest.

    Args:
        z: a tensor of shape (..., columns); fp32, fp16 or bf16. Arithmetic is in fp32.
        bias: a tensor of shape (columns,), or None.
        activation: one of 'relu', 'silu', 'gelu' and 'gelu_tanh'.
        dropout: dropout after the activation, indexed by the elements of z in contiguous order; or None. The
            mask has the same bits on the CPU (``torch.ops.gpipe_fast.keyed_bernoulli``) and on a GPU
            (kernel).

    Raises:
        ValueError: the activation is unknown, shapes do not match, or the dropout arguments are invalid.
        RuntimeError: dropout runs on the CPU and gpipe_fast's extension is not loaded.
    """
    _check(z, bias, activation, dropout)
    result: Tensor = _bias_activation(z, bias, activation, *(dropout or ()))
    return result


def _check(z: Tensor, bias: Tensor | None, activation: str, dropout: Draw | None) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is not one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if z.dim() == 0 or (bias is not None and bias.shape != z.shape[-1:]):
        given = None if bias is None else list(bias.shape)
        raise ValueError(f"z must be (..., columns) and bias (columns,), got {list(z.shape)} and {given}")
    if dropout is not None:
        dropout.check(z)


def _setup(ctx, inputs, output):
    z, bias, ctx.activation, ctx.p, key, ctx.layer, ctx.ordinal = inputs
    ctx.save_for_backward(z, bias, key)


def _differentiate(ctx, g):
    z, bias, key = ctx.saved_tensors
    draw = (ctx.p, key, ctx.layer, ctx.ordinal)
    _, dz, dbias = _bias_activation_backward(z, bias, g, ctx.activation, False, *draw)
    return dz, None if bias is None else dbias, None, None, None, None, None


_bias_activation.register_autograd(_differentiate, setup_context=_setup)
