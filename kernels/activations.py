"""Bias and activation: a fused kernel for the backward of a recomputed segment.

For ``a = act(x)``, ``x = z + b``, with the recomputed product z and the gradient g of a, one pass reads z and
g and writes what the adjacent layers need: a for the gradient of the next weight, ``dz = g act'(x)`` for the
product, and sums of dz over rows for the bias. Phi and phi are the cumulative distribution and the density of
the standard normal distribution, s is the logistic function::

    relu       max(0, x)   0 if x <= 0, else 1; NaN stays NaN
    silu       x s(x)      s(x) (1 + x (1 - s(x)))
    gelu       x Phi(x)    Phi(x) + x phi(x)                                     (arXiv 1606.08415)
    gelu_tanh  x s(2 u)    s(2 u) + 2 x s(2 u) (1 - s(2 u)) u',  u = sqrt(2 / pi) (x + 0.044715 x^3)
    quick_gelu x s(c x)    s(c x) + c x s(c x) (1 - s(c x)),  c = 1.702
    sigmoid    s(x)        s(x) (1 - s(x))
    tanh       tanh(x)     1 - tanh(x)^2

Dropout after the activation, ``a = m act(x) / (1 - p)``, is fused into the same passes; its mask m is
generated from the key (kernels/philox.py). The output a is then taken after dropout, and dz includes the
mask's factor.

Each tensor may have its own dtype. The sums are optional, and do not need a bias: z may already contain it.

Memory traffic per element of itemsize i: the forward reads i bytes and writes i; the backward reads 2 i and
writes 2 i, or i if a is not requested. Bias and sums move bytes per column only.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

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
    num_partial_sums,
    tuned,
    uses_kernels,
)
from gpipe_fast.kernels.partial_sums import launch_partial_sums
from gpipe_fast.kernels.philox import Draw

ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh", "quick_gelu", "sigmoid", "tanh")
# Programs that share the rows of a block of columns, at most. Each writes partial sums.
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
def hyperbolic_tangent(x):
    """Computes tanh(x) with an error of at most two units in the last place.

    Near 0, where 1 - 2 / (exp(2 x) + 1) cancels, by the polynomial of Cephes' tanhf (S. Moshier, 1992).
    """
    square = x * x
    series = 2.06390887954e-2 - 5.70498872745e-3 * square
    series = 1.33314422036e-1 + (series * square - 5.37397155531e-2) * square
    near = x + x * square * (series * square - 3.33332819422e-1)
    far = 1.0 - tl.div_rn(2.0, tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Computes act(x) in fp32."""
    if ACTIVATION == "relu":
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        y = x * tl.sigmoid(_gelu_tanh_argument(x))
    elif ACTIVATION == "quick_gelu":
        y = x * tl.sigmoid(1.702 * x)
    elif ACTIVATION == "sigmoid":
        y = tl.sigmoid(x)
    else:
        y = hyperbolic_tangent(x)
    return y


@triton.jit
def activation_derivative(x, ACTIVATION: tl.constexpr):
    """Computes act'(x) in fp32. 1 - s(v) is computed as s(-v), which does not cancel where s(v) is near 1."""
    if ACTIVATION == "relu":
        y = tl.where(x <= 0.0, 0.0, 1.0)  # 1 for NaN, as in PyTorch: the gradient passes
    elif ACTIVATION == "silu":
        y = tl.sigmoid(x) * (1.0 + x * tl.sigmoid(-x))
    elif ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        y = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
    elif ACTIVATION == "gelu_tanh":
        v = _gelu_tanh_argument(x)
        y = tl.sigmoid(v) * (1.0 + x * tl.sigmoid(-v) * 1.5957691216057308 * (1.0 + 0.134145 * x * x))
    elif ACTIVATION == "quick_gelu":
        v = 1.702 * x
        y = tl.sigmoid(v) * (1.0 + v * tl.sigmoid(-v))
    elif ACTIVATION == "sigmoid":
        y = tl.sigmoid(x) * tl.sigmoid(-x)
    else:
        # 1 - |tanh(x)|, which does not cancel where |tanh(x)| is near 1.
        rest = 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
        y = rest * (2.0 - rest)
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
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    WITH_A: tl.constexpr, WITH_SUMS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
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
        if WITH_SUMS:
            b_sums += tl.sum(dz, axis=0)
    if WITH_SUMS:
        tl.store(p_sums + tl.program_id(1) * num_cols + o_cols, b_sums, mask=m_cols)


def _constants(num_cols: int, has_bias: bool, activation: str, draw: Draw | None) -> dict[str, Any]:
    return {
        "ACTIVATION": activation,
        "HAS_BIAS": has_bias,
        "DROPOUT": philox.elements_per_block(draw, num_cols),
    }


def launch_forward(
    z: Tensor, bias: Tensor | None, activation: str, draw: Draw | None = None, *,
    a_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Computes ``dropout(act(z + bias))`` in z's shape, and in z's dtype unless ``a_dtype`` is given."""
    rows = flatten_rows(z)
    num_rows, num_cols = rows.shape
    config = choose(num_cols, draw is not None)
    a = torch.empty_like(rows, dtype=a_dtype or z.dtype)
    # A one-dimensional grid, because CUDA limits the other grid dimensions to 65535.
    grid = (cdiv(num_cols, config.blocks["COLS"]) * cdiv(num_rows, config.blocks["ROWS"]),)
    key, numbers = philox.arguments(draw, rows)
    tensors = (rows, rows if bias is None else bias.contiguous(), key, a)
    constants = _constants(num_cols, bias is not None, activation, draw)
    launch(_forward, grid, config, *tensors, num_rows, num_cols, *numbers, **constants)
    return a.view(z.shape)


class Backward(NamedTuple):
    """Results of `launch_backward`; None for what was not requested.

    Attributes:
        a: the activation, in z's shape.
        dz: the gradient of z, in z's shape.
        dbias: the sums of dz over rows, of shape (columns,).
    """

    a: Tensor | None
    dz: Tensor
    dbias: Tensor | None


def launch_backward(
    z: Tensor, bias: Tensor | None, g: Tensor, activation: str, with_a: bool, draw: Draw | None = None, *,
    with_sums: bool | None = None, a_dtype: torch.dtype | None = None, dz_dtype: torch.dtype | None = None,
    sums_dtype: torch.dtype = torch.float32,
) -> Backward:  # fmt: skip
    """Computes the gradients of ``dropout(act(z + bias))`` and, if requested, recomputes it.

    Args:
        z: a tensor of shape (..., columns).
        bias: a tensor of shape (columns,), or None if z contains it.
        g: the gradient of the activation, in z's shape.
        activation: one of `ACTIVATIONS`.
        with_a: whether to write the activation.
        draw: dropout of the activation, or None.
        with_sums: whether to sum dz over rows. Default: if there is a bias.
        a_dtype: dtype of the activation. Default: z's.
        dz_dtype: dtype of z's gradient. Default: z's.
        sums_dtype: dtype of the sums without a bias; with a bias they have the bias's.
    """
    rows, g_rows = flatten_rows(z), flatten_rows(g)
    num_rows, num_cols = rows.shape
    config = choose(num_cols, draw is not None)
    with_sums = bias is not None if with_sums is None else with_sums
    a = torch.empty_like(rows, dtype=a_dtype or z.dtype) if with_a else None
    dz = torch.empty_like(rows, dtype=dz_dtype or z.dtype)
    row_blocks, col_blocks = (cdiv(n, config.blocks[k]) for n, k in ((num_rows, "ROWS"), (num_cols, "COLS")))
    most = num_partial_sums(num_rows, col_blocks, z.device) if with_sums else ROW_PROGRAMS
    row_programs = min(ROW_PROGRAMS, most, row_blocks)
    sums = rows.new_empty(row_programs, num_cols, dtype=torch.float32) if with_sums else None
    grid = (col_blocks, row_programs)
    key, numbers = philox.arguments(draw, rows)
    # The kernel does not access absent tensors; `rows` is passed in their place.
    inputs = (rows, rows if bias is None else bias.contiguous(), g_rows, key)
    outputs = (rows if t is None else t for t in (a, dz, sums))
    constants = _constants(num_cols, bias is not None, activation, draw)
    constants |= {"WITH_A": with_a, "WITH_SUMS": with_sums}
    launch(_backward, grid, config, *inputs, *outputs, num_rows, num_cols, *numbers, **constants)
    (dbias,) = launch_partial_sums([sums], [sums_dtype if bias is None else bias.dtype])
    return Backward(None if a is None else a.view(z.shape), dz.view(z.shape), dbias)


def variants() -> dict[str, Variant]:
    """Returns every configuration in the variants that are checked without a GPU."""
    found = {}
    dropout_variants = philox.dropout_variants(CONFIGS.values(), DROPOUT_CONFIG)
    every = itertools.product(("fp32", "bf16"), ACTIVATIONS[:4], dropout_variants)
    for dtype, activation, (dropout, elements_per_block, config) in every:
        constants = {"ACTIVATION": activation, "HAS_BIAS": True, "DROPOUT": elements_per_block}
        name, types = f"{activation}{dropout} {dtype}, {config}", {"p_": dtype}
        found[f"bias_activation forward, {name}"] = _variant(_forward, types, constants, config)
        for with_a in (True, False):
            direction = "backward" if with_a else "backward gradient alone"
            own = constants | {"WITH_A": with_a, "WITH_SUMS": True}
            found[f"bias_activation {direction}, {name}"] = _variant(_backward, types, own, config)
    return found | _variants_without_bias()


def _variants_without_bias() -> dict[str, Variant]:
    """Returns the variants without a bias: all activations, in bf16."""
    found = {}
    configs = [("", 0, CONFIGS[1 << 62]), (" dropout", 4, DROPOUT_CONFIG)]
    for activation, (dropout, elements_per_block, config) in itertools.product(ACTIVATIONS, configs):
        constants = {"ACTIVATION": activation, "HAS_BIAS": False, "DROPOUT": elements_per_block}
        name, types = f"{activation}{dropout} without bias bf16, {config}", {"p_": "bf16"}
        found[f"bias_activation forward, {name}"] = _variant(_forward, types, constants, config)
        own = constants | {"WITH_A": True, "WITH_SUMS": False}
        found[f"bias_activation backward, {name}"] = _variant(_backward, types, own, config)
    return found


def _variant(kernel: Any, types: dict[str, str], constants: dict[str, Any], config: Config) -> Variant:
    """Returns a variant, with a dtype for each tensor: its own in ``types``, or the one named 'p_'."""
    sizes = {"num_rows": "i32", "num_cols": "i32", **philox.SIGNATURE}
    tensors = philox.tensor_types(kernel, types | {"p_sums": "fp32"}, constants)
    aligned = philox.aligned(tensors, constants, "num_cols")
    return Variant(kernel, tensors | sizes, constants, config, aligned)


# Operator schemas have no `Draw` type: its fields are separate arguments, and key=None means no dropout.
@torch.library.triton_op("gpipe_fast::bias_activation", mutates_args={})
def _bias_activation(
    z: Tensor, bias: Tensor | None, activation: str,
    p: float = 0.0, key: Tensor | None = None, layer: int = 0, ordinal: int = 0,
) -> Tensor:  # fmt: skip
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
    return z.new_empty(0) if a is None else a, dz, z.new_empty(0) if dbias is None else dbias


def bias_activation_backward(
    z: Tensor, bias: Tensor | None, g: Tensor, activation: str, dropout: Draw | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes the output and the gradients of a recomputed ``dropout(act(z + bias))`` in one pass.

    Args:
        z: the recomputed product, of shape (..., columns).
        bias: a tensor of shape (columns,), or None.
        g: the gradient of the output, of z's shape.
        activation: one of 'relu', 'silu', 'gelu', 'gelu_tanh', 'quick_gelu', 'sigmoid' and 'tanh'.
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
        activation: one of 'relu', 'silu', 'gelu', 'gelu_tanh', 'quick_gelu', 'sigmoid' and 'tanh'.
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
