"""Bias and activation: the backward of a recomputed segment in one pass.

Of ``a = act(x)``, ``x = z + b``, with a product z that was computed again and the gradient g of a, one pass
reads z and g and writes what the layers around need: a for the next weight's gradient, ``dz = g act'(x)``
for the product, and sums of dz over rows for the bias. With Phi and phi of the normal distribution and s the
logistic function::

    relu       max(0, x)   1 if x > 0, else 0
    silu       x s(x)      s(x) (1 + x (1 - s(x)))
    gelu       x Phi(x)    Phi(x) + x phi(x)                                     (arXiv 1606.08415)
    gelu_tanh  x s(2 u)    s(2 u) + 2 x s(2 u) (1 - s(2 u)) u',  u = sqrt(2 / pi) (x + 0.044715 x^3)

Bytes per element of itemsize i: 2 i read, 2 i written; bias and sums are of the last dimension alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels import reference
from gpipe_fast.kernels.launch import (
    Config,
    Variant,
    cdiv,
    launch,
    rows_of,
    runs_kernels,
    tuned,
)

ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")
# Programs that share the rows of one block of columns: each adds its own up, and PyTorch adds these.
ROW_PROGRAMS = 128

# By how many columns a row has: the first that is wide enough.
CONFIGS = {
    64: Config({"ROWS": 32, "COLS": 64}),
    512: Config({"ROWS": 8, "COLS": 256}),
    1 << 62: Config({"ROWS": 4, "COLS": 512}),
}


def choose(num_cols: int) -> Config:
    """The configuration for rows of so many columns."""
    widest = next(width for width in CONFIGS if num_cols <= width)
    return tuned("bias_activation", f"cols<={widest}", CONFIGS[widest])


@triton.jit
def _twice_u(x):
    return 1.5957691216057308 * (x + 0.044715 * x * x * x)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Act(x), in fp32."""
    if ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    elif ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        y = x * tl.sigmoid(_twice_u(x))
    return y


@triton.jit
def slope(x, ACTIVATION: tl.constexpr):
    """Act'(x), in fp32. 1 - s(v) is s(-v), which loses nothing where s(v) is almost 1."""
    if ACTIVATION == "relu":
        y = tl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "silu":
        y = tl.sigmoid(x) * (1.0 + x * tl.sigmoid(-x))
    elif ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        y = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
    else:
        v = _twice_u(x)
        y = tl.sigmoid(v) * (1.0 + x * tl.sigmoid(-v) * 1.5957691216057308 * (1.0 + 0.134145 * x * x))
    return y


@triton.jit
def _forward(
    p_z, p_bias, p_a, num_rows, num_cols,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    o_cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    o_rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask = (o_rows < num_rows)[:, None] & (o_cols < num_cols)[None, :]
    offsets = o_rows.to(tl.int64)[:, None] * num_cols + o_cols[None, :]
    x = tl.load(p_z + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(p_bias + o_cols, mask=o_cols < num_cols, other=0.0).to(tl.float32)[None, :]
    tl.store(p_a + offsets, activate(x, ACTIVATION).to(p_a.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    p_z, p_bias, p_g, p_a, p_dz, p_sums, num_rows, num_cols,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    o_cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
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
        dz = g * slope(x, ACTIVATION)
        tl.store(p_a + offsets, activate(x, ACTIVATION).to(p_a.dtype.element_ty), mask=mask)
        tl.store(p_dz + offsets, dz.to(p_dz.dtype.element_ty), mask=mask)
        if HAS_BIAS:
            b_sums += tl.sum(dz, axis=0)
    if HAS_BIAS:
        tl.store(p_sums + tl.program_id(1) * num_cols + o_cols, b_sums, mask=m_cols)


def launch_forward(z: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Act(z + bias), of z's shape and dtype."""
    rows = rows_of(z)
    num_rows, num_cols = rows.shape
    config = choose(num_cols)
    a = torch.empty_like(rows)
    grid = (cdiv(num_cols, config.blocks["COLS"]), cdiv(num_rows, config.blocks["ROWS"]))
    arguments = (rows, rows if bias is None else bias.contiguous(), a, num_rows, num_cols)
    launch(_forward, grid, config, *arguments, ACTIVATION=activation, HAS_BIAS=bias is not None)
    return a.view(z.shape)


def launch_backward(
    z: Tensor, bias: Tensor | None, g: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The activation, the gradient of z, and that of the bias, if there is one."""
    rows, g_rows = rows_of(z), rows_of(g)
    num_rows, num_cols = rows.shape
    config = choose(num_cols)
    a, dz = torch.empty_like(rows), torch.empty_like(rows)
    row_programs = min(ROW_PROGRAMS, cdiv(num_rows, config.blocks["ROWS"]))
    sums = torch.empty(
        row_programs if bias is not None else 0, num_cols, dtype=torch.float32, device=z.device
    )
    grid = (cdiv(num_cols, config.blocks["COLS"]), row_programs)
    arguments = (rows, rows if bias is None else bias.contiguous(), g_rows, a, dz, sums, num_rows, num_cols)
    launch(_backward, grid, config, *arguments, ACTIVATION=activation, HAS_BIAS=bias is not None)
    dbias = None if bias is None else sums.sum(0).to(bias.dtype)
    return a.view(z.shape), dz.view(z.shape), dbias


def variants() -> dict[str, Variant]:
    """Every form that the launchers can choose."""
    found = {}
    for dtype in ("fp32", "bf16"):
        for activation in ACTIVATIONS:
            for config in CONFIGS.values():
                constants = {"ACTIVATION": activation, "HAS_BIAS": True}
                sizes = {"num_rows": "i32", "num_cols": "i32"}
                name = f"{activation} {dtype}"
                tensors = dict.fromkeys(("p_z", "p_bias", "p_a"), f"*{dtype}")
                found[f"bias_activation forward, {name}, {config}"] = Variant(
                    _forward, tensors | sizes, constants, config, (*tensors, "num_cols")
                )
                tensors = dict.fromkeys(("p_z", "p_bias", "p_g", "p_a", "p_dz"), f"*{dtype}")
                tensors["p_sums"] = "*fp32"
                found[f"bias_activation backward, {name}, {config}"] = Variant(
                    _backward, tensors | sizes, constants, config, (*tensors, "num_cols")
                )
    return found


@torch.library.triton_op("gpipe_fast::bias_activation", mutates_args={})
def _bias_activation(z: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    if not runs_kernels(z, bias):
        return reference.bias_activation(z, bias, activation)
    return launch_forward(z, bias, activation)


@torch.library.triton_op("gpipe_fast::bias_activation_backward", mutates_args={})
def _bias_activation_backward(
    z: Tensor, bias: Tensor | None, g: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    backward = launch_backward if runs_kernels(z, bias, g) else reference.bias_activation_backward
    a, dz, dbias = backward(z, bias, g, activation)
    return a, dz, z.new_empty(0) if dbias is None else dbias


def bias_activation_backward(
    z: Tensor, bias: Tensor | None, g: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the backward of a recomputed ``act(z + bias)`` needs, in one pass.

    Args:
        z: the product, computed again; of shape (..., columns).
        bias: of shape (columns,), or None.
        g: the gradient of the activation, of z's shape.
        activation: one of 'relu', 'silu', 'gelu' and 'gelu_tanh'.

    Returns:
        The activation, the gradient of z, and that of the bias, or None.

    Raises:
        ValueError: there is no such activation, or shapes do not fit.
    """
    _check(z, bias, activation)
    a, dz, dbias = _bias_activation_backward(z, bias, g, activation)
    return a, dz, None if bias is None else dbias


def bias_activation(z: Tensor, bias: Tensor | None = None, activation: str = "gelu") -> Tensor:
    """``act(z + bias)``, whose backward computes it again: of both, only z is kept.

    Args:
        z: of shape (..., columns); fp32, fp16 or bf16. Computed in fp32.
        bias: of shape (columns,), or None.
        activation: one of 'relu', 'silu', 'gelu' and 'gelu_tanh'.

    Raises:
        ValueError: there is no such activation, or shapes do not fit.
    """
    _check(z, bias, activation)
    result: Tensor = _bias_activation(z, bias, activation)
    return result


def _check(z: Tensor, bias: Tensor | None, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is not one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if z.dim() == 0 or (bias is not None and bias.shape != z.shape[-1:]):
        given = None if bias is None else list(bias.shape)
        raise ValueError(f"the bias must have the last dimension of {list(z.shape)}, got {given}")


def _setup(ctx, inputs, output):
    z, bias, ctx.activation = inputs
    ctx.save_for_backward(z, bias)


def _differentiate(ctx, g):
    z, bias = ctx.saved_tensors
    _, dz, dbias = _bias_activation_backward(z, bias, g, ctx.activation)
    return dz, None if bias is None else dbias, None


_bias_activation.register_autograd(_differentiate, setup_context=_setup)
