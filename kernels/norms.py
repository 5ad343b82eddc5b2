"""LayerNorm and RMSNorm, with and without residual add: the backward of a recomputed segment in one pass.

Of ``y = norm(x)``, where x comes in or is the sum ``residual + h``, one pass over a row reads what came in,
the gradient g of y and, if there is a residual stream, the gradient g_sum of x from there. It writes y for
the next weight's gradient, dx, and sums for the weight and the bias. With n columns, sums over them, weight w
and bias b::

    layer   d = x - sum(x) / n,  v = sum(d^2) / n + eps,  r = 1 / sqrt(v)         (arXiv 1607.06450)
    rms     d = x                                                                  (arXiv 1910.07467)
    y  = d r w + b
    dx = r (g w - d sum(g w d) / (n v) - [layer] sum(g w) / n) + g_sum
    dw = sum over rows of g d r,  db = sum over rows of g

Mean, v and r never leave registers. The sum is rounded to its dtype before it is normalised, so that a
backward that is given the sum returns the same as one that adds again.

Dropout of h, ``x = residual + m h / (1 - p)``, is drawn in the same passes by the key (kernels/philox.py);
the backward then also writes ``dh = m dx / (1 - p)``, beside dx, which is the residual's.

Bytes per element of itemsize i: forward i read, i written; with a residual 2 i and 2 i. Backward 2 i read, i
more with each of residual and g_sum, and 2 i written (without y: i; with dropout i more). In PyTorch's order
the recomputed norm, the gradient of x and those of w and b are three passes, of 5 i read and 2 i written, and
each addition, of the residual or of g_sum, one more of 2 i and i. Sums are of the last dimension and of
programs alone.

Above 8192 columns, where the registers of a program do not hold a row, and in fp64, the reference computes
with PyTorch's operators. Above 4096 dropout is drawn by the kernel of kernels/dropout.py, before and after.
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
    launch,
    rows_of,
    tuned,
)
from gpipe_fast.kernels.philox import Draw

KINDS = ("layer", "rms")

# By how many columns a row has: the first that is wide enough. A program holds whole rows.
CONFIGS = {
    128: Config({"ROWS": 16, "COLS": 128}),
    1024: Config({"ROWS": 2, "COLS": 1024}),
    2048: Config({"ROWS": 1, "COLS": 2048}),
    4096: Config({"ROWS": 1, "COLS": 4096}, num_warps=8),
    8192: Config({"ROWS": 1, "COLS": 8192}, num_warps=16),
}
WIDEST = max(CONFIGS)
# With dropout, whose words take registers; wider rows are summed by the kernel of kernels/dropout.py.
WIDEST_DRAWN = 4096
Gradients = tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]
# Of backward programs that share a GPU's multiprocessor: so many fit with 128 registers a thread.
WARPS_AT_ONCE = 16
# An H100's, for which bytes are counted on tensors without data.
MULTIPROCESSORS = 132


def choose(num_cols: int) -> Config:
    """The configuration for rows of so many columns, at most `WIDEST`."""
    widest = next(width for width in CONFIGS if num_cols <= width)
    return tuned("norm", f"cols<={widest}", CONFIGS[widest])


def widest(draw: Draw | None) -> int:
    """Columns of the widest rows for which kernels are launched."""
    return WIDEST if draw is None else WIDEST_DRAWN


@triton.jit
def _read(p_x, offsets, mask):
    return tl.load(p_x + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _read_sum(p_h, p_residual, factor, offsets, mask, HAS_RESIDUAL: tl.constexpr):
    """What is normalised, rounded to its dtype."""
    x = _read(p_h, offsets, mask)
    if HAS_RESIDUAL:
        x = (_read(p_residual, offsets, mask) + x * factor).to(p_h.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _mean(x, num_cols):
    """Of each row; what is divided is one number of a row, so that it may be divided exactly."""
    return tl.div_rn(tl.sum(x, axis=1), num_cols + 0.0)[:, None]


@triton.jit
def _deviations(x, mask, num_cols, KIND: tl.constexpr):
    """X - m, which is 0 outside of the tensor, so that no digits cancel where it is squared.

    The mean of deviations is what the first mean, rounded, was off by: a lot of them far from zero.
    """
    if KIND == "layer":
        x = tl.where(mask, x - _mean(x, num_cols), 0.0)
        x = tl.where(mask, x - _mean(x, num_cols), 0.0)
    return x


@triton.jit
def _variance_and_r(d, o_rows, num_rows, num_cols, eps):
    """Variance plus eps, and r, of each row; of those beside the tensor ones, for 0 / 0 would reach sums."""
    variance = tl.where((o_rows < num_rows)[:, None], _mean(d * d, num_cols) + eps, 1.0)
    return variance, tl.div_rn(1.0, tl.sqrt_rn(variance))


@triton.jit
def _scale(y, p_weight, p_bias, o_cols, m_cols, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Of d r, y. Weight and bias are read where they are used: they stay in the cache, not in registers."""
    if HAS_WEIGHT:
        y *= _read(p_weight, o_cols, m_cols)[None, :]
    if HAS_BIAS:
        y += _read(p_bias, o_cols, m_cols)[None, :]
    return y


@triton.jit
def _factor(o_rows, num_cols, p_key, layer, ordinal, last, scale, COLS: tl.constexpr, DROPOUT: tl.constexpr):
    """What dropout multiplies h by."""
    factor = 1.0
    if DROPOUT:
        factor = philox.factor_rows(
            o_rows, 0, num_cols, p_key, layer, ordinal, last, scale, COLS, DROPOUT == 4
        )
    return factor


# Numbers that vary from draw to draw are no reason to compile again.
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
    x = _read_sum(p_h, p_residual, factor, offsets, mask, HAS_RESIDUAL)
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
        x = _read_sum(p_h, p_residual, factor, offsets, mask, HAS_RESIDUAL)
        g = _read(p_g, offsets, mask)
        d = _deviations(x, mask, num_cols, KIND)
        variance, r = _variance_and_r(d, o_rows, num_rows, num_cols, eps)
        if WITH_Y:
            y = _scale(d * r, p_weight, p_bias, o_cols, m_cols, HAS_WEIGHT, HAS_BIAS)
            tl.store(p_y + offsets, y.to(p_y.dtype.element_ty), mask=mask)
        b_dweight += g * (d * r)
        b_dbias += g
        if HAS_WEIGHT:
            g *= _read(p_weight, o_cols, m_cols)[None, :]
        dx = g - d * tl.div_rn(_mean(g * d, num_cols), variance)
        if KIND == "layer":
            dx -= _mean(g, num_cols)
        dx *= r
        if HAS_G_SUM:
            dx += _read(p_g_sum, offsets, mask)
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
    """Y, and the sum if there is a residual; both of h's shape and dtype."""
    rows = rows_of(h)
    num_rows, num_cols = rows.shape
    config = choose(num_cols)
    y = torch.empty_like(rows)
    x = None if residual is None else torch.empty_like(rows)
    constants = {"KIND": kind, "DROPOUT": philox.at_once(draw, num_cols)}
    constants |= _given(residual=residual, weight=weight, bias=bias)
    key, numbers = philox.arguments(draw, rows)
    # What is not there is not read, and the rows stand for it.
    inputs = (rows, _rows_or(residual, rows), _or(weight, rows), _or(bias, rows), key, y, _or(x, rows))
    grid = (cdiv(num_rows, config.blocks["ROWS"]) if num_cols else 0,)
    launch(_forward, grid, config, *inputs, num_rows, num_cols, eps, *numbers, **constants)
    return y.view(h.shape), None if x is None else x.view(h.shape)


def launch_backward(
    h: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    g: Tensor, g_sum: Tensor | None, eps: float, kind: str, with_y: bool, draw: Draw | None,
) -> Gradients:  # fmt: skip
    """Y if it is asked for, the gradients of what is normalised, of h if that is another, of the parameters.

    With a draw and no residual, h is what was normalised already.
    """
    rows = rows_of(h)
    num_rows, num_cols = rows.shape
    config = choose(num_cols)
    y, dx = torch.empty_like(rows) if with_y else None, torch.empty_like(rows)
    dh = None if draw is None else torch.empty_like(rows)
    programs = min(_programs(h.device, config), cdiv(num_rows, config.blocks["ROWS"])) if num_cols else 0
    sums = [
        None if p is None else torch.empty(programs, num_cols, dtype=torch.float32, device=h.device)
        for p in (weight, bias)
    ]
    constants = {"KIND": kind, "WITH_Y": with_y, "DROPOUT": philox.at_once(draw, num_cols)}
    constants |= _given(residual=residual, weight=weight, bias=bias, g_sum=g_sum)
    key, numbers = philox.arguments(draw, rows)
    inputs = (rows, _rows_or(residual, rows), _or(weight, rows), _or(bias, rows), key)
    gradients = (rows_of(g), _rows_or(g_sum, rows))
    outputs = (_or(y, rows), dx, _or(dh, rows), *(_or(partial, rows) for partial in sums))
    others = (num_rows, num_cols, eps, *numbers)
    launch(_backward, (programs,), config, *inputs, *gradients, *outputs, *others, **constants)
    dweight, dbias = (
        None if p is None or partial is None else partial.sum(0).to(p.dtype)
        for p, partial in zip((weight, bias), sums, strict=True)
    )
    y, dh = (None if t is None else t.view(h.shape) for t in (y, dh))
    return y, dx.view(h.shape), dh, dweight, dbias


def _programs(device: torch.device, config: Config) -> int:
    """How many share the rows; each adds up its own for weight and bias, and PyTorch adds these."""
    if device.type == "cpu":
        return 4
    multiprocessors: int = MULTIPROCESSORS
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return multiprocessors * max(1, WARPS_AT_ONCE // config.num_warps)


def _given(**tensors: Tensor | None) -> dict[str, bool]:
    return {f"HAS_{name.upper()}": tensor is not None for name, tensor in tensors.items()}


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor.contiguous()


def _rows_or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else rows_of(tensor)


def variants() -> dict[str, Variant]:
    """What the launchers choose from: with all that a segment may have, and as autograd asks for it."""
    found = {}
    for kind, dtype, (width, config) in itertools.product(KINDS, ("fp32", "bf16"), CONFIGS.items()):
        own = {"KIND": kind, "HAS_WEIGHT": True, "HAS_BIAS": kind == "layer"}
        for dropout, at_once in (("", 0), (" and dropout", 4), (" and odd dropout", 1)):
            if at_once and width > WIDEST_DRAWN:
                continue
            forward = own | {"HAS_RESIDUAL": True, "DROPOUT": at_once}
            fused = forward | {"HAS_G_SUM": True, "WITH_Y": True}
            plain = fused | {"HAS_RESIDUAL": False, "HAS_G_SUM": at_once > 0, "WITH_Y": False}
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
