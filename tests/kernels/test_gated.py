"""Gated pairs of kernels/ on the CPU: the operators, errors, torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpipe_fast.kernels import gated_activation, gated_activation_backward

every_form = pytest.mark.parametrize("packed", [True, False], ids=["packed", "two"])


def inputs_of(packed: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """A packed product, or gate and up; 37 columns of an activation."""
    if packed:
        return (torch.randn(3, 5, 74, dtype=dtype),)
    return torch.randn(3, 5, 37, dtype=dtype), torch.randn(3, 5, 37, dtype=dtype)


def grads(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], g: Tensor) -> list[Tensor]:
    """What comes out, and the gradients of all inputs."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


@every_form
def test_gradients_of_doubles(packed: bool) -> None:
    inputs = tuple(t[:1, :2].clone().requires_grad_() for t in inputs_of(packed, torch.float64))
    assert torch.autograd.gradcheck(gated_activation, inputs)


@every_form
def test_operators_are_sound(packed: bool) -> None:
    z, up = (*inputs_of(packed), None)[:2]
    g = torch.randn(3, 5, 37)
    for with_a in (True, False):
        arguments = (z, up, g, "silu", with_a)
        torch.library.opcheck(torch.ops.gpipe_fast.gated_activation_backward.default, arguments)
    z.requires_grad_()
    torch.library.opcheck(torch.ops.gpipe_fast.gated_activation.default, (z, up, "silu"))


@every_form
def test_under_torch_compile(packed: bool) -> None:
    inputs, g = inputs_of(packed), torch.randn(3, 5, 37)
    compiled = torch.compile(gated_activation, backend="aot_eager", fullgraph=True)
    found, expected = grads(compiled, inputs, g), grads(gated_activation, inputs, g)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_does_not_fit() -> None:
    z = torch.randn(4, 6)
    with pytest.raises(ValueError, match="activation is not one of relu, silu, gelu, gelu_tanh, got 'tanh'"):
        gated_activation(z, None, "tanh")
    with pytest.raises(ValueError, match=r"must be even to hold gate and up, got shape \[4, 5\]"):
        gated_activation(z[:, :5])
    with pytest.raises(ValueError, match="must be even"):
        gated_activation(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"up must be torch.float32 of shape \[4, 6\] like the gate, got"):
        gated_activation(z, z[:, :5])
    with pytest.raises(ValueError, match=r"got torch\.float64"):
        gated_activation(z, z.double())
    with pytest.raises(ValueError, match=r"the gradient must be of shape \[4, 3\], got \[4, 6\]"):
        gated_activation_backward(z, None, z, "silu")
