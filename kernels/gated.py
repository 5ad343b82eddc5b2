"""Gated pairs, SwiGLU and GeGLU among them: the backward of a recomputed segment in one pass.

Of ``a = act(x) u`` with a gate x and what it lets through, u (Shazeer, "GLU Variants Improve Transformer",
arXiv 2002.05202), both from products that were computed again, one pass reads x, u and the gradient g of a,
and writes a for the next weight's gradient, and the gradients of both::

    dx = g u act'(x)          du = g act(x)

The activations are those of kernels/activations.py: with silu this is SwiGLU, with gelu GeGLU, with relu
ReGLU. A product of both weights at once has gate and rest side by side, and so has its gradient::

    z  = [ gate | up ]  of 2 n columns          dz = [ dgate | dup ]

Bytes per element of a, of itemsize i: forward 2 i read, i written; backward 3 i read, 3 i written, and
where a is not asked for 2 i.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels import reference
from gpipe_fast.kernels.activations import ACTIVATIONS, activate, slope
from gpipe_fast.kernels.launch import Config, Variant, cdiv, launch, rows_of, runs_kernels, tuned

# By how many columns a has: hidden layers are wide.
CONFIGS = {1 << 62: Config({"ROWS": 2, "COLS": 512})}


def choose(num_cols: int) -> Config:
    """The configuration for rows of so many columns."""
    widest = next(width for width in CONFIGS if num_cols <= width)
    return tuned("gated_activation", f"cols<={widest}", CONFIGS[widest])


@triton.jit
def _forward(
    p_gate, p_up, p_a, num_rows, num_cols, stride,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    col_blocks = tl.cdiv(num_cols, COLS)
    o_cols = tl.program_id(0) % col_blocks * COLS + tl.arange(0, COLS)
    o_rows = tl.program_id(0) // col_blocks * ROWS + tl.arange(0, ROWS)
    mask = (o_rows < num_rows)[:, None] & (o_cols < num_cols)[None, :]
    o_pair = o_rows.to(tl.int64)[:, None] * stride + o_cols[None, :]
    x = tl.load(p_gate + o_pair, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(p_up + o_pair, mask=mask, other=0.0).to(tl.float32)
    a = activate(x, ACTIVATION) * u
    o_a = o_rows.to(tl.int64)[:, None] * num_cols + o_cols[None, :]
    tl.store(p_a + o_a, a.to(p_a.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    p_gate, p_up, p_g, p_a, p_dz, num_rows, num_cols, stride,
    ACTIVATION: tl.constexpr, WITH_A: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    col_blocks = tl.cdiv(num_cols, COLS)
    o_cols = tl.program_id(0) % col_blocks * COLS + tl.arange(0, COLS)
    o_rows = tl.program_id(0) // col_blocks * ROWS + tl.arange(0, ROWS)
    mask = (o_rows < num_rows)[:, None] & (o_cols < num_cols)[None, :]
    o_pair = o_rows.to(tl.int64)[:, None] * stride + o_cols[None, :]
    o_a = o_rows.to(tl.int64)[:, None] * num_cols + o_cols[None, :]
    x = tl.load(p_gate + o_pair, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(p_up + o_pair, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(p_g + o_a, mask=mask, other=0.0).to(tl.float32)
    b_act = activate(x, ACTIVATION)
    if WITH_A:
        tl.store(p_a + o_a, (b_act * u).to(p_a.dtype.element_ty), mask=mask)
    tl.store(p_dz + o_pair, (g * u * slope(x, ACTIVATION)).to(p_dz.dtype.element_ty), mask=mask)
    # Beside the gate's gradient in its row, or after all of it.
    o_du = tl.where(stride == num_cols, tl.cast(num_rows, tl.int64) * num_cols, num_cols)
    tl.store(p_dz + o_du + o_pair, (g * b_act).to(p_dz.dtype.element_ty), mask=mask)


def _pair(z: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate and up as rows: two halves of one, or two tensors of the same strides."""
    rows = rows_of(z)
    return (rows, rows[:, rows.shape[1] // 2 :]) if up is None else (rows, rows_of(up))


def _columns(z: Tensor, up: Tensor | None) -> int:
    return z.shape[-1] // 2 if up is None else z.shape[-1]


def launch_forward(z: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """``act(gate) * up``, contiguous."""
    num_cols = _columns(z, up)
    gate_rows, up_rows = _pair(z, up)
    num_rows, stride = gate_rows.shape
    config = choose(num_cols)
    a = z.new_empty(*z.shape[:-1], num_cols)
    # One dimension: of the others, a GPU counts 65535 programs.
    grid = (cdiv(num_cols, config.blocks["COLS"]) * cdiv(num_rows, config.blocks["ROWS"]),)
    launch(_forward, grid, config, gate_rows, up_rows, a, num_rows, num_cols, stride, ACTIVATION=activation)
    return a


def launch_backward(
    z: Tensor, up: Tensor | None, g: Tensor, activation: str, with_a: bool
) -> tuple[Tensor, Tensor]:
    """The activation, or nothing, and the gradients: packed like z, or one after the other."""
    num_cols = _columns(z, up)
    gate_rows, up_rows = _pair(z, up)
    num_rows, stride = gate_rows.shape
    config = choose(num_cols)
    dz = z.new_empty(z.shape if up is None else (2, *z.shape))
    a = z.new_empty(g.shape if with_a else (0,))
    grid = (cdiv(num_cols, config.blocks["COLS"]) * cdiv(num_rows, config.blocks["ROWS"]),)
    arguments = (gate_rows, up_rows, rows_of(g), a, dz, num_rows, num_cols, stride)
    launch(_backward, grid, config, *arguments, ACTIVATION=activation, WITH_A=with_a)
    return a, dz


def variants() -> dict[str, Variant]:
    """Every form that the launchers can choose."""
    found = {}
    sizes = dict.fromkeys(("num_rows", "num_cols", "stride"), "i32")
    (config,) = CONFIGS.values()
    for dtype in ("fp32", "bf16"):
        for activation in ACTIVATIONS:
            constants = {"ACTIVATION": activation}
            tensors = dict.fromkeys(("p_gate", "p_up", "p_a"), f"*{dtype}")
            found[f"gated_activation forward, {activation} {dtype}, {config}"] = Variant(
                _forward, tensors | sizes, constants, config, (*tensors, "num_cols", "stride")
            )
            tensors = dict.fromkeys(("p_gate", "p_up", "p_g", "p_a", "p_dz"), f"*{dtype}")
            for with_a in (True, False):
                what = f"{activation} {dtype}" + ("" if with_a else " gradient alone")
                found[f"gated_activation backward, {what}, {config}"] = Variant(
                    _backward,
                    tensors | sizes,
                    {**constants, "WITH_A": with_a},
                    config,
                    (*tensors, "num_cols", "stride"),
                )
    return found


@torch.library.triton_op("gpipe_fast::gated_activation", mutates_args={})
def _gated_activation(z: Tensor, up: Tensor | None, activation: str) -> Tensor:
    forward = launch_forward if runs_kernels(z, up) else reference.gated_activation
    return forward(z, up, activation)


@torch.library.triton_op("gpipe_fast::gated_activation_backward", mutates_args={})
def _gated_activation_backward(
    z: Tensor, up: Tensor | None, g: Tensor, activation: str, with_a: bool
) -> tuple[Tensor, Tensor]:
    backward = launch_backward if runs_kernels(z, up, g) else reference.gated_activation_backward
    return backward(z, up, g, activation, with_a)


def gated_activation_backward(
    z: Tensor, up: Tensor | None, g: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the backward of a recomputed gated pair needs, in one pass.

    Args:
        z: the gate, of shape (..., columns); or, without ``up``, both side by side, of shape
            (..., 2 columns).
        up: what the gate lets through, of the gate's shape and dtype; or None.
        g: the gradient of the activation, of shape (..., columns).
        activation: one of 'relu', 'silu', 'gelu' and 'gelu_tanh'.

    Returns:
        The activation, the gradient of z, of its shape, and that of ``up``, or None.

    Raises:
        ValueError: there is no such activation, or shapes or dtypes do not fit.
    """
    _check(z, up, activation)
    shape = (*z.shape[:-1], _columns(z, up))
    if g.shape != shape:
        raise ValueError(f"the gradient must be of shape {list(shape)}, got {list(g.shape)}")
    a, dz = _gated_activation_backward(z, up, g, activation, True)
    return (a, dz, None) if up is None else (a, *dz.unbind())


def gated_activation(z: Tensor, up: Tensor | None = None, activation: str = "silu") -> Tensor:
    """``act(gate) * up``, whose backward computes it again: only what comes in is kept.

    Args:
        z: the gate, of shape (..., columns); or, without ``up``, both side by side, of shape
            (..., 2 columns). fp32, fp16 or bf16; computed in fp32.
        up: what the gate lets through, of the gate's shape and dtype; or None.
        activation: one of 'relu', 'silu' (SwiGLU), 'gelu' and 'gelu_tanh' (GeGLU).

    Returns:
        A contiguous tensor of shape (..., columns), of z's dtype.

    Raises:
        ValueError: there is no such activation, or shapes or dtypes do not fit.
    """
    _check(z, up, activation)
    result: Tensor = _gated_activation(z, up, activation)
    return result


def _check(z: Tensor, up: Tensor | None, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is not one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if up is None and (z.dim() == 0 or z.shape[-1] % 2):
        raise ValueError(f"the last dimension must hold gate and up, an even number, got {list(z.shape)}")
    if up is not None and (z.dim() == 0 or (up.shape, up.dtype) != (z.shape, z.dtype)):
        raise ValueError(
            f"up must be of the gate's {z.dtype}, shape {list(z.shape)}, got {up.dtype}, {list(up.shape)}"
        )


def _setup(ctx, inputs, output):
    z, up, ctx.activation = inputs
    ctx.save_for_backward(z, up)


def _differentiate(ctx, g):
    z, up = ctx.saved_tensors
    _, dz = _gated_activation_backward(z, up, g, ctx.activation, False)
    dgate, dup = (dz, None) if up is None else dz.unbind()
    return dgate, dup, None


_gated_activation.register_autograd(_differentiate, setup_context=_setup)
