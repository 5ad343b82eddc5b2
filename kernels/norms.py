"""LayerNorm and RMSNorm, with and without residual add: fused kernels for a recomputed segment's backward.

For ``y = norm(x)``, where x is the input or the sum ``residual + h``, one pass over a row reads the inputs,
the gradient g of y and, if there is a residual stream, the gradient g_sum of x from that stream. It writes y
for the gradient of the next weight, dx, and partial sums for weight and bias. With n columns (sums are over
columns), weight w and bias b::

    layer   d = x - sum(x) / n,  v = sum(d^2) / n + eps,  r = 1 / sqrt(v)         (arXiv 1607.06450)
    rms     d = x                                                                  (arXiv 1910.07467)
    y  = d r w + b
    dx = r (g w - d sum(g w d) / (n v) - [layer] sum(g w) / n) + g_sum
    dw = sum over rows of g d r,  db = sum over rows of g

Mean, v and r stay in registers. The sum is rounded to its dtype before it is normalized, so that a backward
that receives the sum returns the same result as one that adds again.

Dropout of h, ``x = residual + m h / (1 - p)``, is fused into the same passes; its mask m is generated from
the key (kernels/philox.py). The backward then also writes ``dh = m dx / (1 - p)``; dx is the residual's
gradient.

Memory traffic per element of itemsize i: the forward reads i bytes and writes i, or 2 i and 2 i with a
residual. The backward reads 2 i, and i more for each of residual and g_sum; it writes 2 i (without y: i; with
dropout i more). PyTorch takes three passes for the recomputed norm, the gradient of x and the gradients of w
and b (5 i read and 2 i written), and one pass for each addition of the residual or of g_sum (2 i read, i
written). Partial sums take one row per program.

Above 8192 columns, where a row does not fit into the registers of a program, and in fp64, the reference
computes with PyTorch's operators. Above 4096 columns the kernel of kernels/dropout.py applies dropout, before
the forward and after the backward.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels import philox
from gpipe_fast.kernels.launch import (
    Config,
    Variant,
    cdiv,
    flatten_rows,
    launch,
    tuned,
)
from gpipe_fast.kernels.philox import Draw

KINDS = ("layer", "rms")

# Configurations by the maximum number of columns; the first entry that is wide enough applies. A program
# keeps whole rows in registers.
CONFIGS = {
    128: Config({"ROWS": 16, "COLS": 128}),
    1024: Config({"ROWS": 2, "COLS": 1024}),
    2048: Config({"ROWS": 1, "COLS": 2048}),
    4096: Config({"ROWS": 1, "COLS": 4096}, num_warps=8),
    8192: Config({"ROWS": 1, "COLS": 8192}, num_warps=16),
}
MAX_COLUMNS = max(CONFIGS)
# The limit with dropout, whose random words take registers. kernels/dropout.py adds the residual to wider
# rows.
MAX_COLUMNS_DROPOUT = 4096
Gradients = tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]
# Warps of backward programs per multiprocessor: as many as fit with 128 registers per thread.
WARPS_PER_MULTIPROCESSOR = 16
# The multiprocessors of an H100, assumed when bytes are counted with meta tensors.
DEFAULT_MULTIPROCESSORS = 132


def choose(num_cols: int) -> Config:
    """Returns the configuration for rows of ``num_cols`` columns, at most `MAX_COLUMNS`."""
    max_columns = next(width for width in CONFIGS if num_cols <= width)
    return tuned("norm", f"cols<={max_columns}", CONFIGS[max_columns])


def max_columns(draw: Draw | None) -> int:
    """Returns the maximum number of columns that the kernels support."""
    return MAX_COLUMNS if draw is None else MAX_COLUMNS_DROPOUT


@triton.jit
def _load(p_x, offsets, mask):
    return tl.load(p_x + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_input(p_h, p_residual, factor, offsets, mask, HAS_RESIDUAL: tl.constexpr):
    """Loads the norm's input: h, or the sum rounded to its dtype."""
    x = _load(p_h, offsets, mask)
    if HAS_RESIDUAL:
        x = (_load(p_residual, offsets, mask) + x * factor).to(p_h.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _mean(x, num_cols):
    """Computes the mean of each row. The division is IEEE-exact; its cost is one division per row."""
    return tl.div_rn(tl.sum(x, axis=1), num_cols + 0.0)[:, None]


@triton.jit
def _deviations(x, mask, num_cols, KIND: tl.constexpr):
    """Computes x - mean (x itself for RMSNorm), with 0 outside of the tensor.

    The variance is computed from deviations to avoid cancellation. The mean is subtracted twice: the mean of
    the deviations is the rounding error of the first mean, which is large if x is far from zero.
    """
    if KIND == "layer":
        x = tl.where(mask, x - _mean(x, num_cols), 0.0)
        x = tl.where(mask, x - _mean(x, num_cols), 0.0)
    return x


@triton.jit
def _variance_and_r(d, o_rows, num_rows, num_cols, eps):
    """Computes variance + eps and r of each row. Rows outside of the tensor get 1: 0 / 0 would reach sums."""
    variance = tl.where((o_rows < num_rows)[:, None], _mean(d * d, num_cols) + eps, 1.0)
    return variance, tl.div_rn(1.0, tl.sqrt_rn(variance))


@triton.jit
def _scale(y, p_weight, p_bias, o_cols, m_cols, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Applies weight and bias to d r. Each use loads them: they stay in the cache, not in registers."""
    if HAS_WEIGHT:
        y *= _load(p_weight, o_cols, m_cols)[None, :]
    if HAS_BIAS:
        y += _load(p_bias, o_cols, m_cols)[None, :]
    return y


@triton.jit
def _factor(o_rows, num_cols, p_key, layer, ordinal, last, scale, COLS: tl.constexpr, DROPOUT: tl.constexpr):
    """Computes dropout's factor of h."""
    factor = 1.0
    if DROPOUT:
        factor = philox.factor_rows(
            o_rows, 0, num_cols, p_key, layer, ordinal, last, scale, COLS, DROPOUT == 4
        )
    return factor


# Values that differ between dropout layers must not trigger a recompilation.
@triton.jit(do_not_specialize=["layer", "ordinal", "last"])
def _forward(
    p_h, p_residual, p_weight, p_bias, p_key, p_y, p_sum, num_rows, num_cols, eps,
    layer, ordinal, last, scale,
    KIND: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    o_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_cols = tl.arange(0, COLS)
    m_cols = o_cols < num_cols
    mask = (o_rows < num_rows)[:, None] & m_cols[None, :]
    offsets = o_rows.to(tl.int64)[:, None] * num_cols + o_cols[None, :]
    factor = _factor(o_rows, num_cols, p_key, layer, ordinal, last, scale, COLS, DROPOUT)
    x = _load_input(p_h, p_residual, factor, offsets, mask, HAS_RESIDUAL)
    if HAS_RESIDUAL:
        tl.store(p_sum + offsets, x.to(p_sum.dtype.element_ty), mask=mask)
    d = _deviations(x, mask, num_cols, KIND)
    _, r = _variance_and_r(d, o_rows, num_rows, num_cols, eps)
    y = _scale(d * r, p_weight, p_bias, o_cols, m_cols, HAS_WEIGHT, HAS_BIAS)
    tl.store(p_y + offsets, y.to(p_y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["layer", "ordinal", "last"])
def _backward(
    p_h, p_residual, p_weight, p_bias, p_key, p_g, p_g_sum, p_y, p_dx, p_dh, p_dweight, p_dbias,
    num_rows, num_cols, eps, layer, ordinal, last, scale,
    KIND: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, HAS_G_SUM: tl.constexpr, WITH_Y: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    o_cols = tl.arange(0, COLS)
    m_cols = o_cols < num_cols
    b_dweight = tl.zeros([ROWS, COLS], tl.float32)
    b_dbias = tl.zeros([ROWS, COLS], tl.float32)
    for first_row in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        o_rows = first_row + tl.arange(0, ROWS)
        mask = (o_rows < num_rows)[:, None] & m_cols[None, :]
        offsets = o_rows.to(tl.int64)[:, None] * num_cols + o_cols[None, :]
        factor = _factor(o_rows, num_cols, p_key, layer, ordinal, last, scale, COLS, DROPOUT)
        x = _load_input(p_h, p_residual, factor, offsets, mask, HAS_RESIDUAL)
        g = _load(p_g, offsets, mask)
        d = _deviations(x, mask, num_cols, KIND)
        variance, r = _variance_and_r(d, o_rows, num_rows, num_cols, eps)
        if WITH_Y:
            y = _scale(d * r, p_weight, p_bias, o_cols, m_cols, HAS_WEIGHT, HAS_BIAS)
            tl.store(p_y + offsets, y.to(p_y.dtype.element_ty), mask=mask)
        b_dweight += g * (d * r)
        b_dbias += g
        if HAS_WEIGHT:
            g *= _load(p_weight, o_cols, m_cols)[None, :]
        dx = g - d * tl.div_rn(_mean(g * d, num_cols), variance)
        if KIND == "layer":
            dx -= _mean(g, num_cols)
        dx *= r
        if HAS_G_SUM:
            dx += _load(p_g_sum, offsets, mask)
        tl.store(p_dx + offsets, dx.to(p_dx.dtype.element_ty), mask=mask)
        if DROPOUT:
            tl.store(p_dh + offsets, (dx * factor).to(p_dh.dtype.element_ty), mask=mask)
    o_sums = tl.program_id(0).to(tl.int64) * num_cols + o_cols
    if HAS_WEIGHT:
        tl.store(p_dweight + o_sums, tl.sum(b_dweight, axis=0), mask=m_cols)
    if HAS_BIAS:
        tl.store(p_dbias + o_sums, tl.sum(b_dbias, axis=0), mask=m_cols)


def launch_forward(
    h: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    eps: float, kind: str, draw: Draw | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns y, and the sum if there is a residual (else None); both in h's shape and dtype."""
    rows = flatten_rows(h)
    num_rows, num_cols = rows.shape
    config = choose(num_cols)
    y = torch.empty_like(rows)
    x = None if residual is None else torch.empty_like(rows)
    constants = {"KIND": kind, "DROPOUT": philox.elements_per_block(draw, num_cols)}
    constants |= _has_flags(residual=residual, weight=weight, bias=bias)
    key, numbers = philox.arguments(draw, rows)
    # The kernel does not read absent inputs; `rows` is passed in their place.
    inputs = (
        rows,
        _rows_or(residual, rows),
        _contiguous_or(weight, rows),
        _contiguous_or(bias, rows),
        key,
        y,
        _contiguous_or(x, rows),
    )
    grid = (cdiv(num_rows, config.blocks["ROWS"]) if num_cols else 0,)
    launch(_forward, grid, config, *inputs, num_rows, num_cols, eps, *numbers, **constants)
    return y.view(h.shape), None if x is None else x.view(h.shape)


def launch_backward(
    h: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    g: Tensor, g_sum: Tensor | None, eps: float, kind: str, with_y: bool, draw: Draw | None,
) -> Gradients:  # fmt: skip
    """Returns y (if ``with_y``) and the gradients of the norm's input, h (if dropout), weight and bias.

    With dropout and no residual, h is already the norm's input (the sum).
    """
    rows = flatten_rows(h)
    num_rows, num_cols = rows.shape
    config = choose(num_cols)
    y, dx = torch.empty_like(rows) if with_y else None, torch.empty_like(rows)
    dh = None if draw is None else torch.empty_like(rows)
    programs = (
        min(_num_backward_programs(h.device, config), cdiv(num_rows, config.blocks["ROWS"]))
        if num_cols
        else 0
    )
    sums = [
        None if p is None else torch.empty(programs, num_cols, dtype=torch.float32, device=h.device)
        for p in (weight, bias)
    ]
    constants = {"KIND": kind, "WITH_Y": with_y, "DROPOUT": philox.elements_per_block(draw, num_cols)}
    constants |= _has_flags(residual=residual, weight=weight, bias=bias, g_sum=g_sum)
    key, numbers = philox.arguments(draw, rows)
    inputs = (rows, _rows_or(residual, rows), _contiguous_or(weight, rows), _contiguous_or(bias, rows), key)
    gradients = (flatten_rows(g), _rows_or(g_sum, rows))
    outputs = (
        _contiguous_or(y, rows),
        dx,
        _contiguous_or(dh, rows),
        *(_contiguous_or(partial, rows) for partial in sums),
    )
    others = (num_rows, num_cols, eps, *numbers)
    launch(_backward, (programs,), config, *inputs, *gradients, *outputs, *others, **constants)
    dweight, dbias = (
        None if p is None or partial is None else partial.sum(0).to(p.dtype)
        for p, partial in zip((weight, bias), sums, strict=True)
    )
    y, dh = (None if t is None else t.view(h.shape) for t in (y, dh))
    return y, dx.view(h.shape), dh, dweight, dbias


def _num_backward_programs(device: torch.device, config: Config) -> int:
    """Returns the number of backward programs. Each writes a row of partial sums, which PyTorch adds."""
    if device.type == "cpu":
        return 4
    multiprocessors: int = DEFAULT_MULTIPROCESSORS
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return multiprocessors * max(1, WARPS_PER_MULTIPROCESSOR // config.num_warps)


def _has_flags(**tensors: Tensor | None) -> dict[str, bool]:
    return {f"HAS_{name.upper()}": tensor is not None for name, tensor in tensors.items()}


def _contiguous_or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor.contiguous()


def _rows_or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else flatten_rows(tensor)


def variants() -> dict[str, Variant]:
    """Returns the launchers' variants: with all optional inputs of a segment, and as autograd calls them."""
    found = {}
    for kind, dtype, (width, config) in itertools.product(KINDS, ("fp32", "bf16"), CONFIGS.items()):
        own = {"KIND": kind, "HAS_WEIGHT": True, "HAS_BIAS": kind == "layer"}
        for dropout, elements_per_block in (("", 0), (" and dropout", 4), (" and odd dropout", 1)):
            if elements_per_block and width > MAX_COLUMNS_DROPOUT:
                continue
            forward = own | {"HAS_RESIDUAL": True, "DROPOUT": elements_per_block}
            fused = forward | {"HAS_G_SUM": True, "WITH_Y": True}
            plain = fused | {"HAS_RESIDUAL": False, "HAS_G_SUM": elements_per_block > 0, "WITH_Y": False}
            name = f"{dtype}, {config}"
            found[f"{kind}_norm forward with residual{dropout}, {name}"] = _variant(
                _forward, dtype, forward, config
            )
            found[f"{kind}_norm backward with y, g_sum, residual{dropout}, {name}"] = _variant(
                _backward, dtype, fused, config
            )
            alone = dropout.replace(" and", " with g_sum and")
            found[f"{kind}_norm backward{alone}, {name}"] = _variant(_backward, dtype, plain, config)
    return found


def _variant(kernel: triton.JITFunction, dtype: str, constants: dict[str, Any], config: Config) -> Variant:
    tensors = {name: f"*{dtype}" for name in kernel.arg_names if name.startswith("p_")}
    tensors |= {name: "*fp32" for name in ("p_dweight", "p_dbias") if name in tensors}
    if constants["DROPOUT"]:
        tensors["p_key"] = "*i64"
    others = {"num_rows": "i32", "num_cols": "i32", "eps": "fp32", **philox.SIGNATURE}
    aligned = () if constants["DROPOUT"] == 1 else ("num_cols",)
    return Variant(kernel, tensors | others, constants, config, (*tensors, *aligned))
