"""Activations and their derivatives, as device functions, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels.activations import activate, activation_derivative, hyperbolic_tangent
from gpipe_fast.kernels.launch import Config, launch
from tests.unit.kernels.numerics.comparison import DEVICE, needs_kernels

pytestmark = needs_kernels

SIZE = 512
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
every_activation = pytest.mark.parametrize("name", EXACT)


@triton.jit
def apply_kernel(p_x, p_y, FUNCTION: tl.constexpr, ACTIVATION: tl.constexpr, SIZE: tl.constexpr):
    x = tl.load(p_x + tl.arange(0, SIZE))
    if FUNCTION == "tanh":
        y = hyperbolic_tangent(x)
    elif FUNCTION == "value":
        y = activate(x, ACTIVATION)
    else:
        y = activation_derivative(x, ACTIVATION)
    tl.store(p_y + tl.arange(0, SIZE), y)


def apply(function: str, x: Tensor, activation: str = "") -> Tensor:
    y = torch.empty_like(x)
    launch(apply_kernel, (1,), Config({"SIZE": SIZE}), x, y, FUNCTION=function, ACTIVATION=activation)
    return y


def numbers() -> Tensor:
    """Returns numbers near 0, where a difference would cancel, and numbers where the activations saturate."""
    half = torch.logspace(-6, 2, SIZE // 2, device=DEVICE)
    return torch.cat([-half, half])


def error(found: Tensor, exact: Tensor) -> float:
    """Returns the largest error, in units of the last place of float32 or of numbers near 1e-3."""
    unit = exact.abs().clamp(min=1e-3) * torch.finfo(torch.float32).eps
    return float(((found - exact).abs() / unit).max())


def test_the_hyperbolic_tangent_is_accurate_near_zero_and_far_from_it() -> None:
    x = numbers()
    exact = x.double().tanh()
    assert float(((apply("tanh", x) - exact) / exact).abs().max()) < 4 * torch.finfo(torch.float32).eps


@every_activation
def test_values_and_derivatives_match_pytorch(name: str) -> None:
    x = numbers()
    exact = x.double().requires_grad_()
    expected = EXACT[name](exact)
    (derivative,) = torch.autograd.grad(expected.sum(), exact)
    own = error(EXACT[name](x), expected.detach())  # near -5, Phi(x) of PyTorch cancels, too
    assert error(apply("value", x, name), expected.detach()) <= max(32, own)
    assert error(apply("derivative", x, name), derivative) < 128
    large = torch.full((SIZE,), 200.0, device=DEVICE)
    assert torch.equal(apply("value", large, name), large)
    assert torch.equal(apply("derivative", large, name), torch.ones_like(x))
    assert torch.equal(apply("derivative", -large, name).abs(), torch.zeros_like(x))
