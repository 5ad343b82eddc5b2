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

Mean, v and r stay in registers; the forward also writes mean and r if a backward saves them. The sum is
rounded to its own dtype before it is normalized, so that a backward that receives the sum returns the same
result as one that adds again.

Each tensor may have its own dtype. Under autocast the residual stream is fp32, and h, y and g are bf16.

If h comes from a linear layer, the sums of the gradient of h over rows are that layer's bias gradient.

Dropout of h, ``x = residual + m h / (1 - p)``, is fused into the same passes; its mask m is generated from
the key (kernels/philox.py). The backward then also writes ``dh = m dx / (1 - p)``; dx is the residual's
gradient.

Memory traffic per element of itemsize i: the forward reads i bytes and writes i, or 2 i and 2 i with a
residual. The backward reads 2 i, and i more for each of residual and g_sum; it writes 2 i (without y: i; with
dropout i more). PyTorch takes three passes for the recomputed norm, the gradient of x and the gradients of w
and b (5 i read and 2 i written), and one pass for each addition of the residual or of g_sum (2 i read, i
written). Partial sums take one row per program; another launch
(kernels/partial_sums.py) adds them.

Above 8192 columns, where a row does not fit into the registers of a program, and in fp64, the reference
computes with PyTorch's operators. Above 4096 columns the kernel of kernels/dropout.py applies dropout, before
the forward and after the backward.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpipe_fast.kernels import norm_kernels, philox
from gpipe_fast.kernels.launch import (
    DTYPE_NAMES,
    ROWS_PER_PARTIAL_SUM,
    Config,
    Variant,
    cdiv,
    flatten_rows,
    launch,
    num_multiprocessors,
    tuned,
)
from gpipe_fast.kernels.partial_sums import launch_partial_sums
from gpipe_fast.kernels.philox import Draw

KINDS = ("layer", "rms")

# Configurations by the maximum number of columns; the first entry that is wide enough applies. A program
# keeps whole rows in registers.
CONFIGS = {
    128: Config({"ROWS": 32, "COLS": 128}, num_warps=8),
    1024: Config({"ROWS": 2, "COLS": 1024}),
    2048: Config({"ROWS": 1, "COLS": 2048}),
    4096: Config({"ROWS": 1, "COLS": 4096}, num_warps=8),
    8192: Config({"ROWS": 1, "COLS": 8192}, num_warps=16),
}
# Forwards, which need fewer registers, except with dropout.
FORWARD_CONFIGS = {
    **CONFIGS,
    128: Config({"ROWS": 16, "COLS": 128}),
    2048: Config({"ROWS": 1, "COLS": 2048}, num_warps=8),
}
MAX_COLUMNS = max(CONFIGS)
# The limit with dropout, whose random words take registers. kernels/dropout.py adds the residual to wider
# rows.
MAX_COLUMNS_DROPOUT = 4096
# With sums of h's gradient, which also take registers: a thread has 8 elements. PyTorch sums the gradient of
# wider rows.
SUMS_CONFIGS = {
    128: Config({"ROWS": 16, "COLS": 128}, num_warps=8),
    1024: Config({"ROWS": 1, "COLS": 1024}),
    2048: Config({"ROWS": 1, "COLS": 2048}, num_warps=8),
    4096: Config({"ROWS": 1, "COLS": 4096}, num_warps=16),
}
MAX_COLUMNS_SUMS = max(SUMS_CONFIGS)
# Warps of backward programs per multiprocessor: as many as fit with 128 registers per thread.
WARPS_PER_MULTIPROCESSOR = 16


class Forward(NamedTuple):
    """Results of `launch_forward`; None for what was not requested.

    Attributes:
        y: the norm, in h's shape.
        total: the sum, in h's shape.
        mean: the mean of each row, fp32 of shape (rows,).
        r: the reciprocal standard deviation of each row, fp32 of shape (rows,).
    """

    y: Tensor
    total: Tensor | None
    mean: Tensor | None
    r: Tensor | None


class Backward(NamedTuple):
    """Results of `launch_backward`; None for what was not requested.

    Attributes:
        y: the recomputed norm, in h's shape.
        dx: the gradient of the norm's input, in h's shape.
        dh: the gradient of h: dx with dropout's mask and in its own dtype.
        dweight: the gradient of the weight, in its dtype.
        dbias: the gradient of the bias, in its dtype.
        sums: the sums of h's gradient over rows, of shape (columns,).
    """

    y: Tensor | None
    dx: Tensor
    dh: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    sums: Tensor | None


def choose(num_cols: int, with_sums: bool = False, *, forward: bool = False) -> Config:
    """Returns the configuration for rows of ``num_cols`` columns, at most `MAX_COLUMNS`.

    With sums of h's gradient there are at most `MAX_COLUMNS_SUMS` columns.

    Args:
        num_cols: the number of columns.
        with_sums: whether a backward sums h's gradient.
        forward: whether the configuration is for a forward.
    """
    max_columns = next(width for width in CONFIGS if num_cols <= width)
    if with_sums:
        return tuned("norm_with_sums", f"cols<={max_columns}", SUMS_CONFIGS[max_columns])
    return tuned("norm", f"cols<={max_columns}", (FORWARD_CONFIGS if forward else CONFIGS)[max_columns])


def max_columns(draw: Draw | None) -> int:
    """Returns the maximum number of columns that the kernels support."""
    return MAX_COLUMNS if draw is None else MAX_COLUMNS_DROPOUT


def launch_forward(
    h: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    eps: float, kind: str, draw: Draw | None, *,
    y_dtype: torch.dtype | None = None, sum_dtype: torch.dtype | None = None,
    with_sum: bool = True, with_statistics: bool = False,
) -> Forward:  # fmt: skip
    """Computes the norm of h, or of the sum ``residual + dropout(h)``.

    Args:
        h: a tensor of shape (..., columns).
        residual: a tensor of h's shape, or None.
        weight: a tensor of shape (columns,), or None for ones.
        bias: a tensor of shape (columns,), or None for zeros.
        eps: a number added to the variance.
        kind: one of `KINDS`.
        draw: dropout of h, or None. Without a residual it is ignored.
        y_dtype: dtype of the norm. Default: the dtype of the norm's input.
        sum_dtype: dtype of the sum. Default: the dtype of ``residual + h``.
        with_sum: whether to write the sum, if there is a residual.
        with_statistics: whether to write ``r`` and, for LayerNorm, the mean.
    """
    rows = flatten_rows(h)
    num_rows, num_cols = rows.shape
    config = choose(num_cols, forward=True)
    sum_dtype = _sum_dtype(h, residual, sum_dtype)
    y = torch.empty_like(rows, dtype=y_dtype or sum_dtype)
    x = torch.empty_like(rows, dtype=sum_dtype) if residual is not None and with_sum else None
    mean = _empty_statistics(rows) if with_statistics and kind == "layer" else None
    r = _empty_statistics(rows) if with_statistics else None
    constants = {
        "KIND": kind,
        "DROPOUT": philox.elements_per_block(draw, num_cols),
        "SUM_DTYPE": DTYPE_NAMES[sum_dtype],
        "WITH_SUM": x is not None,
        "WITH_STATISTICS": with_statistics,
        **_flags("HAS", residual=residual, weight=weight, bias=bias),
    }
    key, numbers = philox.arguments(draw, rows)
    # The kernel does not access absent tensors; `rows` is passed in their place.
    inputs = (rows, _rows_or(residual, rows), _contiguous_or(weight, rows), _contiguous_or(bias, rows), key)
    outputs = (y, *(rows if t is None else t for t in (x, mean, r)))
    grid = (cdiv(num_rows, config.blocks["ROWS"]) if num_cols else 0,)
    sizes = (num_rows, num_cols, eps)
    launch(norm_kernels.forward, grid, config, *inputs, *outputs, *sizes, *numbers, **constants)
    return Forward(y.view(h.shape), None if x is None else x.view(h.shape), mean, r)


def launch_backward(
    h: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    g: Tensor, g_sum: Tensor | None, eps: float, kind: str, with_y: bool, draw: Draw | None, *,
    y_dtype: torch.dtype | None = None, sum_dtype: torch.dtype | None = None,
    dx_dtype: torch.dtype | None = None, dh_dtype: torch.dtype | None = None,
    with_dweight: bool = True, with_dbias: bool = True, with_sums: bool = False,
    sums_dtype: torch.dtype = torch.float32,
) -> Backward:  # fmt: skip
    """Computes the gradients of a norm and, if requested, recomputes the norm.

    With dropout and no residual, h is already the norm's input (the sum); dh then still is the gradient of
    the tensor to which dropout was applied.

    Args:
        h: as in `launch_forward`.
        residual: as in `launch_forward`.
        weight: as in `launch_forward`.
        bias: as in `launch_forward`.
        g: the gradient of the norm, in h's shape.
        g_sum: a gradient that is added to dx, in h's shape; or None.
        eps: as in `launch_forward`.
        kind: as in `launch_forward`.
        with_y: whether to write the norm.
        draw: dropout of h, or None.
        y_dtype: as in `launch_forward`.
        sum_dtype: as in `launch_forward`.
        dx_dtype: dtype of dx. Default: the dtype of the norm's input.
        dh_dtype: dtype of dh, h's by default. With dropout there is a dh, without dropout only if this dtype
            is given.
        with_dweight: whether to compute the weight's gradient, if there is a weight.
        with_dbias: whether to compute the bias's gradient, if there is a bias.
        with_sums: whether to sum h's gradient over rows.
        sums_dtype: dtype of these sums.
    """
    rows = flatten_rows(h)
    num_rows, num_cols = rows.shape
    fused_sums = with_sums and num_cols <= MAX_COLUMNS_SUMS
    config = choose(num_cols, fused_sums)
    sum_dtype = _sum_dtype(h, residual, sum_dtype)
    with_dh = draw is not None or dh_dtype is not None
    y = torch.empty_like(rows, dtype=y_dtype or sum_dtype) if with_y else None
    dx = torch.empty_like(rows, dtype=dx_dtype or sum_dtype)
    dh = torch.empty_like(rows, dtype=dh_dtype or h.dtype) if with_dh else None
    programs = _num_backward_programs(rows, config)
    wanted = (weight is not None and with_dweight, bias is not None and with_dbias, fused_sums)
    partials = [rows.new_empty(programs, num_cols, dtype=torch.float32) if w else None for w in wanted]
    constants = {
        "KIND": kind,
        "DROPOUT": philox.elements_per_block(draw, num_cols),
        "SUM_DTYPE": DTYPE_NAMES[sum_dtype],
        **_flags("HAS", residual=residual, weight=weight, bias=bias, g_sum=g_sum),
        **_flags("WITH", y=y, dh=dh, dweight=partials[0], dbias=partials[1], sums=partials[2]),
    }
    key, numbers = philox.arguments(draw, rows)
    inputs = (rows, _rows_or(residual, rows), _contiguous_or(weight, rows), _contiguous_or(bias, rows), key)
    gradients = (flatten_rows(g), _rows_or(g_sum, rows))
    outputs = (rows if t is None else t for t in (y, dx, dh, *partials))
    others = (num_rows, num_cols, eps, *numbers)
    launch(norm_kernels.backward, (programs,), config, *inputs, *gradients, *outputs, *others, **constants)
    dtypes = (*(None if t is None else t.dtype for t in (weight, bias)), sums_dtype)
    dweight, dbias, sums = launch_partial_sums(partials, dtypes)
    if with_sums and not fused_sums:
        sums = (dx if dh is None else dh).sum(0, dtype=torch.float32).to(sums_dtype)
    y, dh = (None if t is None else t.view(h.shape) for t in (y, dh))
    return Backward(y, dx.view(h.shape), dh, dweight, dbias, sums)


def _sum_dtype(h: Tensor, residual: Tensor | None, given: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of the norm's input."""
    if residual is None:
        return h.dtype
    return given or torch.promote_types(h.dtype, residual.dtype)


def _empty_statistics(rows: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], dtype=torch.float32)


def _num_backward_programs(rows: Tensor, config: Config) -> int:
    """Returns the number of backward programs. Each writes a row of partial sums."""
    if not rows.shape[1]:
        return 0
    if rows.device.type == "cpu":
        programs = 4
    else:
        multiprocessors = num_multiprocessors(rows.device)
        programs = multiprocessors * max(1, WARPS_PER_MULTIPROCESSOR // config.num_warps)
        programs = min(programs, max(multiprocessors, cdiv(rows.shape[0], ROWS_PER_PARTIAL_SUM)))
    return min(programs, cdiv(rows.shape[0], config.blocks["ROWS"]))


def _flags(prefix: str, **tensors: Tensor | None) -> dict[str, bool]:
    return {f"{prefix}_{name.upper()}": tensor is not None for name, tensor in tensors.items()}


def _contiguous_or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor.contiguous()


def _rows_or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else flatten_rows(tensor)


def variants() -> dict[str, Variant]:
    """Returns the launchers' variants: with all optional inputs of a segment, and as autograd calls them."""
    found = {}
    for kind, dtype, (width, config) in itertools.product(KINDS, ("fp32", "bf16"), CONFIGS.items()):
        for dropout, elements_per_block in (("", 0), (" and dropout", 4), (" and odd dropout", 1)):
            if elements_per_block and width > MAX_COLUMNS_DROPOUT:
                continue
            own = _constants(kind, dtype, elements_per_block)
            forward = own | {"HAS_RESIDUAL": True, "WITH_SUM": True, "WITH_STATISTICS": False}
            fused = own | {"HAS_RESIDUAL": True, "HAS_G_SUM": True, "WITH_Y": True}
            plain = own | {"HAS_RESIDUAL": False, "HAS_G_SUM": elements_per_block > 0, "WITH_Y": False}
            written = _written_gradients(kind) | {"WITH_DH": elements_per_block > 0}
            name, types, in_forward = f"{dtype}, {config}", {"p_": dtype}, FORWARD_CONFIGS[width]
            found[f"{kind}_norm forward with residual{dropout}, {dtype}, {in_forward}"] = _variant(
                norm_kernels.forward, types, forward, in_forward
            )
            found[f"{kind}_norm backward with y, g_sum, residual{dropout}, {name}"] = _variant(
                norm_kernels.backward, types, fused | written, config
            )
            alone = dropout.replace(" and", " with g_sum and")
            found[f"{kind}_norm backward{alone}, {name}"] = _variant(
                norm_kernels.backward, types, plain | written, config
            )
    return found


def _constants(kind: str, sum_dtype: str, elements_per_block: int) -> dict[str, Any]:
    own = {"KIND": kind, "SUM_DTYPE": sum_dtype, "DROPOUT": elements_per_block}
    return own | {"HAS_WEIGHT": True, "HAS_BIAS": kind == "layer"}


def _written_gradients(kind: str) -> dict[str, bool]:
    return {"WITH_DWEIGHT": True, "WITH_DBIAS": kind == "layer", "WITH_SUMS": False}


def _variant(kernel: Any, types: dict[str, str], constants: dict[str, Any], config: Config) -> Variant:
    """Returns a variant, with a dtype for each tensor: its own in ``types``, or the one named 'p_'."""
    fp32 = dict.fromkeys(("p_dweight", "p_dbias", "p_sums", "p_mean", "p_r"), "fp32")
    tensors = philox.tensor_types(kernel, types | fp32, constants)
    others = {"num_rows": "i32", "num_cols": "i32", "eps": "fp32", **philox.SIGNATURE}
    return Variant(
        kernel, tensors | others, constants, config, philox.aligned(tensors, constants, "num_cols")
    )
