"""Precomputed gradients: the forward computes them, and the backward scales them in place.

The backward computes ``gradient *= g``, where the incoming gradient g has one element, or one per row. A loss
is usually the last node of a graph, so g is usually 1: the kernel then reads only g. It reads g on the
device, without a synchronization with the host.

Memory traffic per element of itemsize i: none if g is 1; otherwise i bytes read and i written.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels import reference
from gpipe_fast.kernels.launch import Config, cdiv, choose, launch, uses_kernels
from gpipe_fast.torch_private.autograd import keeps_graph

# Programs that share the rows of one block of columns.
ROW_PROGRAMS = 64

# Configurations by the maximum number of columns; the first entry that is wide enough applies.
CONFIGS = {
    64: Config({"ROWS": 32, "COLS": 64}),
    1 << 62: Config({"ROWS": 1, "COLS": 2048}),
}


@triton.jit
def _scale(
    p_gradient, p_g, num_rows, num_cols, stride, g_stride, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    o_cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    for first_row in range(tl.program_id(1) * ROWS, num_rows, tl.num_programs(1) * ROWS):
        o_rows = first_row + tl.arange(0, ROWS)
        m_rows = o_rows < num_rows
        b_g = tl.load(p_g + o_rows * g_stride, mask=m_rows, other=1.0).to(tl.float32)
        if tl.sum((b_g != 1.0).to(tl.int32), axis=0) > 0:
            mask = m_rows[:, None] & (o_cols < num_cols)[None, :]
            offsets = o_rows.to(tl.int64)[:, None] * stride + o_cols[None, :]
            gradient = tl.load(p_gradient + offsets, mask=mask, other=0.0).to(tl.float32) * b_g[:, None]
            tl.store(p_gradient + offsets, gradient.to(p_gradient.dtype.element_ty), mask=mask)


def view_rows(tensor: Tensor) -> Tensor | None:
    """Returns a view as a matrix with all but the last dimension flattened, or None if it needs a copy.

    The last dimension of the view has stride 1, and its rows do not overlap.
    """
    sizes, strides = tensor.shape, tensor.stride()
    last = tensor.dim() - 1
    flattenable = all(strides[d] == strides[d + 1] * sizes[d + 1] for d in range(last - 1))
    rows_disjoint = last == 0 or strides[last - 1] >= sizes[last]
    if not tensor.is_contiguous() and not (strides[last] == 1 and flattenable and rows_disjoint):
        return None
    return tensor.view(math.prod(sizes[:-1]), sizes[-1])


def launch_scale(gradient: Tensor, g: Tensor) -> None:
    """Computes ``gradient *= g`` in place; skips elements where g is 1."""
    rows = view_rows(gradient)
    if rows is None:
        reference.scale_(gradient, g)
        return
    num_rows, num_cols = rows.shape
    config = choose(CONFIGS, num_cols)
    grid = (cdiv(num_cols, config.blocks["COLS"]), min(ROW_PROGRAMS, cdiv(num_rows, config.blocks["ROWS"])))
    g_stride = 0 if g.dim() == 0 else 1
    launch(_scale, grid, config, rows, g.contiguous(), num_rows, num_cols, rows.stride(0), g_stride)


@torch.library.triton_op("gpipe_fast::scale_precomputed_gradient_", mutates_args={"gradient"})
def _scale_(gradient: Tensor, g: Tensor) -> None:
    (launch_scale if uses_kernels(gradient, g) else reference.scale_)(gradient, g)


@torch.library.triton_op("gpipe_fast::with_precomputed_gradient", mutates_args={})
def _with_precomputed_gradient(gradient: Tensor, loss: Tensor) -> Tensor:
    return loss.clone()


def _setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def _differentiate(ctx, g):
    return scale_gradient(ctx.saved_tensors[0], g), None


_with_precomputed_gradient.register_autograd(_differentiate, setup_context=_setup)


def with_precomputed_gradient(gradient: Tensor, loss: Tensor) -> Tensor:
    """Returns a copy of ``loss`` whose gradient with respect to ``gradient`` is this tensor's current value.

    ``gradient`` is the logits tensor, which the forward has overwritten with the gradient of the logits.
    """
    result: Tensor = _with_precomputed_gradient(gradient, loss)
    return result


def scale_gradient(gradient: Tensor, g: Tensor) -> Tensor:
    """Returns ``gradient * g``; computed in place unless the graph is retained for another backward.

    Args:
        gradient: a tensor of shape (..., columns), saved by the forward.
        g: the incoming gradient, of shape () or of the gradient's shape without the last dimension.

    Raises:
        RuntimeError: the backward itself is being differentiated (`create_graph`).
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the loss's gradient is computed in the forward and cannot be differentiated; "
            "pass create_graph=False"
        )
    # The saved tensor may be overwritten only in the last backward of its graph, and not while the backward
    # is traced, because the saved tensor may also be an output of the trace.
    if type(gradient) is not Tensor or keeps_graph():
        return (gradient * (g if g.dim() == 0 else g.unsqueeze(-1))).to(gradient.dtype)
    _scale_(gradient, g)
    return gradient
