"""Gated activations in kernels/ on the CPU: operators, errors and torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpipe_fast.kernels import gated_activation, gated_activation_backward

packed_and_separate = pytest.mark.parametrize("packed", [True, False], ids=["packed", "separate"])


def random_inputs(packed: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Returns gate and up, packed in one tensor or separate; the activation has 37 columns."""
    if packed:
        return (torch.randn(3, 5, 74, dtype=dtype),)
    return torch.randn(3, 5, 37, dtype=dtype), torch.randn(3, 5, 37, dtype=dtype)


def output_and_gradients(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], g: Tensor
) -> list[Tensor]:
    """Returns the output of a function, and the gradients of all inputs."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


@packed_and_separate
def test_gated_activation_passes_gradcheck(packed: bool) -> None:
    inputs = tuple(t[:1, :2].clone().requires_grad_() for t in random_inputs(packed, torch.float64))
    assert torch.autograd.gradcheck(gated_activation, inputs)


@packed_and_separate
def test_gated_activation_operators_pass_opcheck(packed: bool) -> None:
    z, up = (*random_inputs(packed), None)[:2]
    g = torch.randn(3, 5, 37)
    for with_a in (True, False):
        arguments = (z, up, g, "silu", with_a)
        torch.library.opcheck(torch.ops.gpipe_fast.gated_activation_backward.default, arguments)
    z.requires_grad_()
    torch.library.opcheck(torch.ops.gpipe_fast.gated_activation.default, (z, up, "silu"))


@packed_and_separate
def test_a_compiled_gated_activation_equals_the_eager_one(packed: bool) -> None:
    inputs, g = random_inputs(packed), torch.randn(3, 5, 37)
    compiled = torch.compile(gated_activation, backend="aot_eager", fullgraph=True)
    found, expected = (
        output_and_gradients(compiled, inputs, g),
        output_and_gradients(gated_activation, inputs, g),
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_gated_activation_rejects_invalid_arguments() -> None:
    z = torch.randn(4, 6)
    with pytest.raises(ValueError, match=r"activation is not one of relu, silu, .*, tanh, got 'selu'"):
        gated_activation(z, None, "selu")
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
