"""Triton kernels of a user, in operators that a layer calls: a scaled SiLU, and a copy in place."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.library import triton_op, wrap_triton


@triton.jit
def forward_kernel(x, w, y, count, width, scale, SIZE: tl.constexpr):
    """Computes ``y = scale x w / (1 + exp(-x))``; a program has SIZE elements."""
    o = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    m = o < count
    b_x = tl.load(x + o, m)
    b_w = tl.load(w + o % width, m)
    tl.store(y + o, scale * b_x * b_w / (1 + tl.exp(-b_x)), m)


@triton.jit
def backward_kernel(dy, x, w, dx, dw, count, width, scale, SIZE: tl.constexpr):
    """Computes the gradient of x, and adds to the gradient of w."""
    o = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    m = o < count
    b_x = tl.load(x + o, m)
    b_dy = scale * tl.load(dy + o, m)
    b_sigmoid = 1 / (1 + tl.exp(-b_x))
    b_slope = b_sigmoid * (1 + b_x * (1 - b_sigmoid))
    tl.store(dx + o, b_dy * tl.load(w + o % width, m) * b_slope, m)
    tl.atomic_add(dw + o % width, b_dy * b_x * b_sigmoid, m)


@triton_op("gpipe_fast_test::scaled_silu", mutates_args={})
def scaled_silu(x: Tensor, w: Tensor, scale: float) -> Tensor:
    y = torch.empty_like(x)
    count = x.numel()
    wrap_triton(forward_kernel)[lambda meta: (triton.cdiv(count, meta["SIZE"]),)](
        x, w, y, count, w.numel(), scale, SIZE=16
    )
    return y


@triton_op("gpipe_fast_test::scaled_silu_backward", mutates_args={})
def scaled_silu_backward(dy: Tensor, x: Tensor, w: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    dx, dw = torch.empty_like(x), torch.zeros_like(w)
    count = x.numel()
    wrap_triton(backward_kernel)[(triton.cdiv(count, 32),)](
        dy, x, w, dx, dw, count, w.numel(), scale, 32, num_warps=2
    )
    return dx, dw


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, ctx.scale = inputs
    ctx.save_for_backward(x, w)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    x, w = ctx.saved_tensors
    return (*scaled_silu_backward(dy.contiguous(), x, w, ctx.scale), None)


scaled_silu.register_autograd(_backward, setup_context=_setup)


class ScaledSiLU(nn.Module):
    """A layer that calls the operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        return scaled_silu(x, self.weight, 0.5)


class PlainScaledSiLU(ScaledSiLU):
    """The same, of PyTorch's operators."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * self.weight * nn.functional.silu(x)


@triton.jit(do_not_specialize=["seed"])
def shift_kernel(
    x, shift, stride, count, seed, NEGATIVE: tl.constexpr, ROUNDS: tl.constexpr, SIZE: tl.constexpr = 16
):
    """Adds ``ROUNDS shift + seed`` to x in place, or subtracts it."""
    o = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    m = o < count
    total = tl.load(x + o * stride, m)
    for _ in range(ROUNDS):
        total += -tl.load(shift) if NEGATIVE else tl.load(shift)
    tl.store(x + o * stride, total + seed, m)


tuned_shift_kernel = triton.autotune(
    configs=[
        triton.Config({"ROUNDS": 1}, num_warps=1),
        triton.Config({"ROUNDS": 2}, num_warps=8, num_stages=2),
    ],
    key=["count"],
)(shift_kernel)


def _blocks(x: Tensor) -> tuple[int, ...]:
    return (triton.cdiv(x.numel(), 16),)


@triton_op("gpipe_fast_test::shifted", mutates_args={})
def shifted(x: Tensor, shift: Tensor) -> Tensor:
    """Changes a copy, then one of two halves of new memory."""
    y = x.clone()
    wrap_triton(shift_kernel)[_blocks(x)](y, shift, 1, x.numel(), 16, NEGATIVE=False, ROUNDS=2, num_warps=1)
    wrap_triton(shift_kernel)[(0,)](y, shift, 1, x.numel(), 0, NEGATIVE=False, ROUNDS=2)
    halves = torch.zeros(2, *x.shape, device=x.device, dtype=x.dtype)
    wrap_triton(shift_kernel)[_blocks(x)](halves[1], shift, 1, x.numel(), 0, NEGATIVE=True, ROUNDS=1)
    return y + halves[1] - halves[0]


@triton_op("gpipe_fast_test::tuned", mutates_args={})
def tuned(x: Tensor, shift: Tensor) -> Tensor:
    y = x.clone()
    grid = lambda meta: (meta["ROUNDS"] * triton.cdiv(x.numel(), 32),)  # noqa: E731
    wrap_triton(tuned_shift_kernel)[grid](y, shift, 1, x.numel(), 0, NEGATIVE=False)
    return y


def _identity(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    return dy, dy.sum()


shifted.register_autograd(_identity)
tuned.register_autograd(_identity)


class Shifted(nn.Module):
    """A layer that calls one of the operators, which add a learned scalar."""

    def __init__(self, is_tuned: bool = False) -> None:
        super().__init__()
        self.is_tuned = is_tuned
        self.shift = nn.Parameter(torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        return (tuned if self.is_tuned else shifted)(x, self.shift)


class PlainShifted(nn.Module):
    """The same, of PyTorch's operators."""

    def __init__(self, constant: float) -> None:
        super().__init__()
        self.constant = constant
        self.shift = nn.Parameter(torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift + self.constant
