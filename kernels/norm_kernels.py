"""The Triton kernels of LayerNorm and RMSNorm. kernels/norms.py has the formulas and the launchers."""

from __future__ import annotations

import triton
import triton.language as tl

from gpipe_fast.kernels import philox


@triton.jit
def _load(p_x, offsets, mask):
    return tl.load(p_x + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_input(p_h, p_residual, factor, offsets, mask, HAS_RESIDUAL: tl.constexpr, SUM_DTYPE: tl.constexpr):
    """Loads the norm's input: h, or the sum rounded to its dtype ('fp32', 'fp16' or 'bf16')."""
    x = _load(p_h, offsets, mask)
    if HAS_RESIDUAL:
        x = _load(p_residual, offsets, mask) + x * factor
        if SUM_DTYPE == "bf16":
            x = x.to(tl.bfloat16).to(tl.float32)
        elif SUM_DTYPE == "fp16":
            x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def _mean(x, num_cols):
    """Computes the mean of each row. The division is IEEE-exact; its cost is one division per row."""
    return tl.div_rn(tl.sum(x, axis=1), num_cols + 0.0)[:, None]


@triton.jit
def _deviations(x, mask, num_cols, KIND: tl.constexpr):
    """Computes x - mean, with 0 outside of the tensor, and the mean of each row. RMSNorm has mean 0.

    The variance is computed from deviations to avoid cancellation. The mean is subtracted twice: the mean of
    the deviations is the rounding error of the first mean, which is large if x is far from zero.
    """
    if KIND == "layer":
        mean = _mean(x, num_cols)
        x = tl.where(mask, x - mean, 0.0)
        error = _mean(x, num_cols)
        x = tl.where(mask, x - error, 0.0)
        mean += error
    else:
        mean = tl.zeros([x.shape[0], 1], tl.float32)
    return x, mean


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
def forward(
    p_h, p_residual, p_weight, p_bias, p_key, p_y, p_sum, p_mean, p_r, num_rows, num_cols, eps,
    layer, ordinal, last, scale,
    KIND: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, SUM_DTYPE: tl.constexpr, WITH_SUM: tl.constexpr, WITH_STATISTICS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    o_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_cols = tl.arange(0, COLS)
    m_cols = o_cols < num_cols
    mask = (o_rows < num_rows)[:, None] & m_cols[None, :]
    offsets = o_rows.to(tl.int64)[:, None] * num_cols + o_cols[None, :]
    factor = _factor(o_rows, num_cols, p_key, layer, ordinal, last, scale, COLS, DROPOUT)
    x = _load_input(p_h, p_residual, factor, offsets, mask, HAS_RESIDUAL, SUM_DTYPE)
    if WITH_SUM:
        tl.store(p_sum + offsets, x.to(p_sum.dtype.element_ty), mask=mask)
    d, mean = _deviations(x, mask, num_cols, KIND)
    _, r = _variance_and_r(d, o_rows, num_rows, num_cols, eps)
    if WITH_STATISTICS:
        m_rows = (o_rows < num_rows)[:, None]
        if KIND == "layer":
            tl.store(p_mean + o_rows[:, None], mean, mask=m_rows)
        tl.store(p_r + o_rows[:, None], r, mask=m_rows)
    y = _scale(d * r, p_weight, p_bias, o_cols, m_cols, HAS_WEIGHT, HAS_BIAS)
    tl.store(p_y + offsets, y.to(p_y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["layer", "ordinal", "last"])
def backward(
    p_h, p_residual, p_weight, p_bias, p_key, p_g, p_g_sum, p_y, p_dx, p_dh, p_dweight, p_dbias, p_sums,
    num_rows, num_cols, eps, layer, ordinal, last, scale,
    KIND: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_G_SUM: tl.constexpr, DROPOUT: tl.constexpr, SUM_DTYPE: tl.constexpr, WITH_Y: tl.constexpr,
    WITH_DH: tl.constexpr, WITH_DWEIGHT: tl.constexpr, WITH_DBIAS: tl.constexpr, WITH_SUMS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    o_cols = tl.arange(0, COLS)
    m_cols = o_cols < num_cols
    b_dweight = tl.zeros([ROWS, COLS], tl.float32)
    b_dbias = tl.zeros([ROWS, COLS], tl.float32)
    b_sums = tl.zeros([ROWS, COLS], tl.float32)
    for first_row in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        o_rows = first_row + tl.arange(0, ROWS)
        mask = (o_rows < num_rows)[:, None] & m_cols[None, :]
        offsets = o_rows.to(tl.int64)[:, None] * num_cols + o_cols[None, :]
        factor = _factor(o_rows, num_cols, p_key, layer, ordinal, last, scale, COLS, DROPOUT)
        x = _load_input(p_h, p_residual, factor, offsets, mask, HAS_RESIDUAL, SUM_DTYPE)
        # Not converted before its first use: until then, 16 bits take half of the registers.
        g = tl.load(p_g + offsets, mask=mask, other=0.0)
        d, _ = _deviations(x, mask, num_cols, KIND)
        variance, r = _variance_and_r(d, o_rows, num_rows, num_cols, eps)
        if WITH_Y:
            y = _scale(d * r, p_weight, p_bias, o_cols, m_cols, HAS_WEIGHT, HAS_BIAS)
            tl.store(p_y + offsets, y.to(p_y.dtype.element_ty), mask=mask)
        g = g.to(tl.float32)
        if WITH_DWEIGHT:
            b_dweight += g * (d * r)
        if WITH_DBIAS:
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
        dh = dx * factor
        if WITH_DH:
            tl.store(p_dh + offsets, dh.to(p_dh.dtype.element_ty), mask=mask)
        if WITH_SUMS:
            b_sums += dh
    o_sums = tl.program_id(0).to(tl.int64) * num_cols + o_cols
    if WITH_DWEIGHT:
        tl.store(p_dweight + o_sums, tl.sum(b_dweight, axis=0), mask=m_cols)
    if WITH_DBIAS:
        tl.store(p_dbias + o_sums, tl.sum(b_dbias, axis=0), mask=m_cols)
    if WITH_SUMS:
        tl.store(p_sums + o_sums, tl.sum(b_sums, axis=0), mask=m_cols)
