"""Gated activations such as SwiGLU and GeGLU: a fused kernel for the backward of a recomputed segment.

For ``a = act(x) u`` with the gate x and the gated value u (Shazeer, "GLU Variants Improve Transformer", arXiv
2002.05202), both recomputed products, one pass reads x, u and the gradient g of a, and writes a for the
gradient of the next weight, and the gradients of x and u::

    dx = g u act'(x)          du = g act(x)

The activations are defined in kernels/activations.py: silu gives SwiGLU, gelu GeGLU and relu ReGLU. If one
product computes both, gate and up are packed in its columns, and so is its gradient::

    z  = [ gate | up ]  of 2 n columns          dz = [ dgate | dup ]

Dropout after the gated activation, ``a = m act(x) u / (1 - p)``, is fused into the same passes; its mask m is
generated from the key (kernels/philox.py), indexed by the elements of a in contiguous order.

Each tensor may have its own dtype.

Memory traffic per element of a, of itemsize i: the forward reads 2 i bytes and writes i; the backward reads
3 i and writes 3 i, or 2 i if a is not requested.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels import philox, reference
from gpipe_fast.kernels.activations import ACTIVATIONS, activate, activation_derivative
from gpipe_fast.kernels.launch import Config, Variant, cdiv, flatten_rows, launch, tuned, uses_kernels
from gpipe_fast.kernels.philox import Draw

# Configurations by the maximum number of columns of a. There is only one: hidden layers are wide.
CONFIGS = {1 << 62: Config({"ROWS": 2, "COLS": 512})}


# The configuration for any width with dropout: random bits take registers.
DROPOUT_CONFIG = Config({"ROWS": 2, "COLS": 512})


def choose(num_cols: int, dropout: bool = False) -> Config:
    """Returns the configuration for rows of ``num_cols`` columns."""
    if dropout:
        return tuned("gated_activation_dropout", "cols", DROPOUT_CONFIG)
    widest = next(width for width in CONFIGS if num_cols <= width)
    return tuned("gated_activation", f"cols<={widest}", CONFIGS[widest])


# Values that differ between dropout layers must not trigger a recompilation.
@triton.jit(do_not_specialize=["layer", "ordinal", "last"])
def _forward(
    p_gate, p_up, p_key, p_a, num_rows, num_cols, stride, layer, ordinal, last, scale,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    col_blocks = tl.cdiv(num_cols, COLS)
    first_col = tl.program_id(0) % col_blocks * COLS
    o_cols = first_col + tl.arange(0, COLS)
    o_rows = tl.program_id(0) // col_blocks * ROWS + tl.arange(0, ROWS)
    mask = (o_rows < num_rows)[:, None] & (o_cols < num_cols)[None, :]
    o_pair = o_rows.to(tl.int64)[:, None] * stride + o_cols[None, :]
    x = tl.load(p_gate + o_pair, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(p_up + o_pair, mask=mask, other=0.0).to(tl.float32)
    a = activate(x, ACTIVATION) * u
    if DROPOUT:
        a *= philox.factor_rows(
            o_rows, first_col, num_cols, p_key, layer, ordinal, last, scale, COLS, DROPOUT == 4
        )
    o_a = o_rows.to(tl.int64)[:, None] * num_cols + o_cols[None, :]
    tl.store(p_a + o_a, a.to(p_a.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["layer", "ordinal", "last"])
def _backward(
    p_gate, p_up, p_g, p_key, p_a, p_dgate, p_dup, num_rows, num_cols, stride, layer, ordinal, last, scale,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, WITH_A: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # A packed gradient is one tensor, so that a graph's launch has one output for it.
    if PACKED == "gate first":
        p_dup = p_dgate + num_cols
    elif PACKED == "up first":
        p_dup = p_dgate
        p_dgate = p_dgate + num_cols
    col_blocks = tl.cdiv(num_cols, COLS)
    first_col = tl.program_id(0) % col_blocks * COLS
    o_cols = first_col + tl.arange(0, COLS)
    o_rows = tl.program_id(0) // col_blocks * ROWS + tl.arange(0, ROWS)
    mask = (o_rows < num_rows)[:, None] & (o_cols < num_cols)[None, :]
    o_pair = o_rows.to(tl.int64)[:, None] * stride + o_cols[None, :]
    o_a = o_rows.to(tl.int64)[:, None] * num_cols + o_cols[None, :]
    x = tl.load(p_gate + o_pair, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(p_up + o_pair, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(p_g + o_a, mask=mask, other=0.0).to(tl.float32)
    b_act = activate(x, ACTIVATION)
    if DROPOUT:
        # The factor applies to a and to g.
        factor = philox.factor_rows(
            o_rows, first_col, num_cols, p_key, layer, ordinal, last, scale, COLS, DROPOUT == 4
        )
        g *= factor
    else:
        factor = 1.0
    if WITH_A:
        tl.store(p_a + o_a, (b_act * u * factor).to(p_a.dtype.element_ty), mask=mask)
    dgate, dup = g * u * activation_derivative(x, ACTIVATION), g * b_act
    tl.store(p_dgate + o_pair, dgate.to(p_dgate.dtype.element_ty), mask=mask)
    tl.store(p_dup + o_pair, dup.to(p_dup.dtype.element_ty), mask=mask)


def _gate_and_up(z: Tensor, up: Tensor | None, gate_first: bool) -> tuple[Tensor, Tensor]:
    """Returns gate and up as matrices with equal strides: both halves of z, or z and up."""
    rows = flatten_rows(z)
    if up is not None:
        return rows, flatten_rows(up)
    second_half = rows[:, rows.shape[1] // 2 :]
    return (rows, second_half) if gate_first else (second_half, rows)


def _num_columns(z: Tensor, up: Tensor | None) -> int:
    return z.shape[-1] // 2 if up is None else z.shape[-1]


def launch_forward(
    z: Tensor, up: Tensor | None, activation: str, draw: Draw | None = None, *,
    gate_first: bool = True, a_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Computes ``dropout(act(gate) * up)``: a contiguous tensor.

    Args:
        z: the gate, of shape (..., columns); or gate and up packed, of shape (..., 2 columns).
        up: the value that the gate multiplies, of the gate's shape; or None if it is packed in z.
        activation: one of `ACTIVATIONS`.
        draw: dropout of the output, or None.
        gate_first: whether the gate is the first half of a packed z.
        a_dtype: dtype of the output. Default: z's.
    """
    num_cols = _num_columns(z, up)
    gate_rows, up_rows = _gate_and_up(z, up, gate_first)
    num_rows, stride = gate_rows.shape[0], z.shape[-1]
    config = choose(num_cols, draw is not None)
    a = z.new_empty((*z.shape[:-1], num_cols), dtype=a_dtype or z.dtype)
    # A one-dimensional grid, because CUDA limits the other grid dimensions to 65535.
    grid = (cdiv(num_cols, config.blocks["COLS"]) * cdiv(num_rows, config.blocks["ROWS"]),)
    key, numbers = philox.arguments(draw, gate_rows)
    arguments = (gate_rows, up_rows, key, a, num_rows, num_cols, stride, *numbers)
    constants = {"ACTIVATION": activation, "DROPOUT": philox.elements_per_block(draw, num_cols)}
    launch(_forward, grid, config, *arguments, **constants)
    return a


class Backward(NamedTuple):
    """Results of `launch_backward`.

    Attributes:
        a: the output, contiguous of shape (..., columns); None if not requested.
        dz: the gradient of z, contiguous in z's shape.
        dup: the gradient of up, contiguous in up's shape; None if up is packed in z.
    """

    a: Tensor | None
    dz: Tensor
    dup: Tensor | None


def launch_backward(
    z: Tensor, up: Tensor | None, g: Tensor, activation: str, with_a: bool, draw: Draw | None = None, *,
    gate_first: bool = True, a_dtype: torch.dtype | None = None,
    dz_dtype: torch.dtype | None = None, dup_dtype: torch.dtype | None = None,
) -> Backward:  # fmt: skip
    """Computes the gradients of ``dropout(act(gate) * up)`` and, if requested, recomputes it.

    Args:
        z: as in `launch_forward`.
        up: as in `launch_forward`.
        g: the gradient of the output, of shape (..., columns).
        activation: one of `ACTIVATIONS`.
        with_a: whether to write the output.
        draw: dropout of the output, or None.
        gate_first: as in `launch_forward`.
        a_dtype: as in `launch_forward`.
        dz_dtype: dtype of z's gradient. Default: z's.
        dup_dtype: dtype of up's gradient, if up is not packed in z. Default: up's.
    """
    num_cols = _num_columns(z, up)
    gate_rows, up_rows = _gate_and_up(z, up, gate_first)
    num_rows, stride = gate_rows.shape[0], z.shape[-1]
    config = choose(num_cols, draw is not None)
    dz = z.new_empty(num_rows, stride, dtype=dz_dtype or z.dtype)
    dup = None if up is None else up.new_empty(num_rows, stride, dtype=dup_dtype or up.dtype)
    a = z.new_empty(g.shape, dtype=a_dtype or z.dtype) if with_a else None
    grid = (cdiv(num_cols, config.blocks["COLS"]) * cdiv(num_rows, config.blocks["ROWS"]),)
    key, numbers = philox.arguments(draw, gate_rows)
    inputs = (gate_rows, up_rows, flatten_rows(g), key)
    # The kernel does not access an absent output; the gate is passed in its place.
    outputs = (gate_rows if a is None else a, dz, gate_rows if dup is None else dup)
    constants = {
        "ACTIVATION": activation,
        "DROPOUT": philox.elements_per_block(draw, num_cols),
        "WITH_A": with_a,
        "PACKED": "no" if up is not None else "gate first" if gate_first else "up first",
    }
    sizes = (num_rows, num_cols, stride)
    launch(_backward, grid, config, *inputs, *outputs, *sizes, *numbers, **constants)
    return Backward(a, dz.view(z.shape), None if up is None or dup is None else dup.view(up.shape))


def variants() -> dict[str, Variant]:
    """Returns every configuration in the variants that are checked without a GPU."""
    found = {}
    dropout_variants = philox.dropout_variants(CONFIGS.values(), DROPOUT_CONFIG)
    for dtype, activation, (dropout, elements_per_block, config) in itertools.product(
        ("fp32", "bf16"), ACTIVATIONS[:4], dropout_variants
    ):
        constants = {"ACTIVATION": activation, "DROPOUT": elements_per_block}
        name, types = f"{activation}{dropout} {dtype}, {config}", {"p_": dtype}
        found[f"gated_activation forward, {name}"] = _variant(_forward, types, constants, config)
        for with_a in (True, False):
            direction = "backward" if with_a else "backward gradient alone"
            own = constants | {"WITH_A": with_a, "PACKED": "no"}
            found[f"gated_activation {direction}, {name}"] = _variant(_backward, types, own, config)
    # Dtypes of autocast: a product with an fp32 tensor makes g fp32.
    for activation, config in itertools.product(("silu", "gelu", "sigmoid"), CONFIGS.values()):
        constants = {"ACTIVATION": activation, "DROPOUT": 0, "WITH_A": True, "PACKED": "no"}
        name = f"gated_activation backward, {activation} g fp32, bf16, {config}"
        found[name] = _variant(_backward, {"p_": "bf16", "p_g": "fp32"}, constants, config)
        for packed in ("gate first", "up first"):
            name = f"gated_activation backward, {activation} packed, {packed} bf16, {config}"
            own = constants | {"PACKED": packed}
            found[name] = _variant(_backward, {"p_": "bf16"}, own, config)
    return found


def _variant(kernel: Any, types: dict[str, str], constants: dict[str, Any], config: Config) -> Variant:
    """Returns a variant, with a dtype for each tensor: its own in ``types``, or the one named 'p_'."""
    sizes = {**dict.fromkeys(("num_rows", "num_cols", "stride"), "i32"), **philox.SIGNATURE}
    tensors = philox.tensor_types(kernel, types, constants)
    aligned = philox.aligned(tensors, constants, "num_cols", "stride")
    return Variant(kernel, tensors | sizes, constants, config, aligned)


# Operator schemas have no `Draw` type: its fields are separate arguments, and key=None means no dropout.
@torch.library.triton_op("gpipe_fast::gated_activation", mutates_args={})
def _gated_activation(
    z: Tensor,
    up: Tensor | None,
    activation: str,
    p: float = 0.0,
    key: Tensor | None = None,
    layer: int = 0,
    ordinal: int = 0,
) -> Tensor:
    draw = None if key is None else Draw(p, key, layer, ordinal)
    forward = launch_forward if uses_kernels(z, up, key) else reference.gated_activation
    return forward(z, up, activation, draw)


@torch.library.triton_op("gpipe_fast::gated_activation_backward", mutates_args={})
def _gated_activation_backward(
    z: Tensor,
    up: Tensor | None,
    g: Tensor,
    activation: str,
    with_a: bool,
    p: float = 0.0,
    key: Tensor | None = None,
    layer: int = 0,
    ordinal: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    draw = None if key is None else Draw(p, key, layer, ordinal)
    backward = launch_backward if uses_kernels(z, up, g, key) else reference.gated_activation_backward
    a, dz, dup = backward(z, up, g, activation, with_a, draw)
    return z.new_empty(0) if a is None else a, dz, z.new_empty(0) if dup is None else dup


def gated_activation_backward(
    z: Tensor, up: Tensor | None, g: Tensor, activation: str, dropout: Draw | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes the output and the gradients of a recomputed gated activation in one pass.

    Args:
        z: the gate, of shape (..., columns); or, without ``up``, gate and up packed, of shape
            (..., 2 columns).
        up: the value that the gate multiplies, of the gate's shape and dtype; or None.
        g: the gradient of the output, of shape (..., columns).
        activation: one of `ACTIVATIONS`.
        dropout: dropout of the output, indexed by its elements in contiguous order; or None.

    Returns:
        The output, the gradient of z in z's shape, and the gradient of ``up`` (None without ``up``).

    Raises:
        ValueError: the activation is unknown, shapes or dtypes do not match, or the dropout arguments are
            invalid.
        RuntimeError: dropout runs on the CPU and gpipe_fast's extension is not loaded.
    """
    _check(z, up, activation, dropout)
    shape = (*z.shape[:-1], _num_columns(z, up))
    if g.shape != shape:
        raise ValueError(f"the gradient must be of shape {list(shape)}, got {list(g.shape)}")
    a, dz, dup = _gated_activation_backward(z, up, g, activation, True, *(dropout or ()))
    return a, dz, None if up is None else dup


def gated_activation(
    z: Tensor, up: Tensor | None = None, activation: str = "silu", dropout: Draw | None = None
) -> Tensor:
    """Computes ``dropout(act(gate) * up)``. Saves only the inputs: the backward recomputes the rest.

    Args:
        z: the gate, of shape (..., columns); or, without ``up``, gate and up packed, of shape
            (..., 2 columns). fp32, fp16 or bf16; arithmetic is in fp32.
        up: the value that the gate multiplies, of the gate's shape and dtype; or None.
        activation: one of 'silu' (SwiGLU), 'gelu' and 'gelu_tanh' (GeGLU), 'sigmoid' (GLU), 'relu',
            'quick_gelu' and 'tanh'.
        dropout: dropout of the output, indexed by its elements in contiguous order; or None. The mask has the
            same bits on the CPU (``torch.ops.gpipe_fast.keyed_bernoulli``) and on a GPU (kernel).

    Returns:
        A contiguous tensor of shape (..., columns) and z's dtype.

    Raises:
        ValueError: the activation is unknown, shapes or dtypes do not match, or the dropout arguments are
            invalid.
        RuntimeError: dropout runs on the CPU and gpipe_fast's extension is not loaded.
    """
    _check(z, up, activation, dropout)
    result: Tensor = _gated_activation(z, up, activation, *(dropout or ()))
    return result


def _check(z: Tensor, up: Tensor | None, activation: str, dropout: Draw | None) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is not one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if up is None and (z.dim() == 0 or z.shape[-1] % 2):
        raise ValueError(f"the last dimension must be even to hold gate and up, got shape {list(z.shape)}")
    if up is not None and (z.dim() == 0 or (up.shape, up.dtype) != (z.shape, z.dtype)):
        raise ValueError(
            f"up must be {z.dtype} of shape {list(z.shape)} like the gate, got {up.dtype} of {list(up.shape)}"
        )
    if dropout is not None:
        dropout.check(z)


def _setup(ctx, inputs, output):
    z, up, ctx.activation, ctx.p, key, ctx.layer, ctx.ordinal = inputs
    ctx.save_for_backward(z, up, key)


def _differentiate(ctx, g):
    z, up, key = ctx.saved_tensors
    draw = (ctx.p, key, ctx.layer, ctx.ordinal)
    _, dz, dup = _gated_activation_backward(z, up, g, ctx.activation, False, *draw)
    return dz, None if up is None else dup, None, None, None, None, None


_gated_activation.register_autograd(_differentiate, setup_context=_setup)
