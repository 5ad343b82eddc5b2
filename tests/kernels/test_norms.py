"""LayerNorm and RMSNorm on the CPU: the reference implementation, operators, errors and torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from gpipe_fast.kernels import layer_norm, layer_norm_backward, rms_norm, rms_norm_backward
from gpipe_fast.kernels.norms import KINDS

every_norm = pytest.mark.parametrize("kind", KINDS)
EPS = 1e-5


def random_leaves(*shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Returns x, residual, weight and bias, which require gradients."""
    torch.manual_seed(0)
    tensors = [*torch.randn(2, *shape, dtype=dtype), *torch.randn(2, shape[-1], dtype=dtype)]
    return [tensor.clone().requires_grad_() for tensor in tensors]


def ours(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    if kind == "layer":
        return layer_norm(x, weight, bias, EPS, residual=residual)
    y, total = rms_norm(x, weight, EPS, residual=residual)
    return y + bias, total


def eager(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    total = residual + x
    if kind == "layer":
        return F.layer_norm(total, weight.shape, weight, bias, EPS), total
    return F.rms_norm(total, weight.shape, weight, EPS) + bias, total


@every_norm
@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (0, 7), (3, 0), (2, 10000)])
def test_norms_and_their_gradients_match_pytorch(shape: tuple[int, ...], kind: str) -> None:
    inputs = random_leaves(*shape)
    gradients = list(torch.randn(2, *shape, dtype=torch.float64))
    found, expected = (function(*inputs, kind) for function in (ours, eager))
    assert_close(found, expected)
    assert_close(*(torch.autograd.grad(outputs, inputs, gradients) for outputs in (found, expected)))


@every_norm
def test_norms_without_residual_and_parameters_match_pytorch(kind: str) -> None:
    x, *_ = random_leaves(3, 7)
    y = layer_norm(x) if kind == "layer" else rms_norm(x)
    # The default eps of PyTorch's LayerNorm and of Llama's RMSNorm.
    expected = F.layer_norm(x, (7,)) if kind == "layer" else F.rms_norm(x, (7,), eps=1e-6)
    g = torch.randn(3, 7, dtype=torch.float64)
    assert_close(y, expected)
    assert_close(torch.autograd.grad(y, x, g), torch.autograd.grad(expected, x, g))


@every_norm
def test_the_fused_norm_backward_matches_autograd(kind: str) -> None:
    x, residual, weight, bias = random_leaves(2, 3, 7)
    g, g_sum = torch.randn(2, 2, 3, 7, dtype=torch.float64)
    if kind == "layer":
        y, total = layer_norm(x, weight, bias, residual=residual)
        parameters = (weight, bias)
        found = layer_norm_backward(x, weight, bias, g, residual=residual, g_sum=g_sum)
    else:
        y, total = rms_norm(x, weight, residual=residual)
        parameters = (weight,)
        found = rms_norm_backward(x, weight, g, residual=residual, g_sum=g_sum)
    expected = torch.autograd.grad([y, total], (x, residual, *parameters), [g, g_sum])
    assert_close(found, (y, *expected))
    assert torch.equal(expected[0], expected[1])


def test_layer_norm_of_bf16_is_computed_in_fp32() -> None:
    x, residual, weight, bias = (t.detach() for t in random_leaves(50, 100, dtype=torch.bfloat16))
    y, total = layer_norm(x, weight, bias, residual=residual)
    assert torch.equal(total, residual + x)
    expected = F.layer_norm(total.float(), (100,), weight.float(), bias.float())
    assert_close(y.float(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("requires_grad", [False, True])
@every_norm
def test_norm_operators_pass_opcheck(kind: str, requires_grad: bool) -> None:
    x, residual, weight, bias = (t.detach().requires_grad_(requires_grad) for t in random_leaves(5, 7))
    g, g_sum = torch.randn(2, 5, 7, dtype=torch.float64)
    ops = torch.ops.gpipe_fast
    torch.library.opcheck(ops.norm, (x, weight, None, EPS, kind))
    torch.library.opcheck(ops.add_norm, (x, residual, weight, bias, EPS, kind))
    if not requires_grad:
        torch.library.opcheck(ops.norm_backward, (x, residual, weight, bias, g, g_sum, EPS, kind, True))
        torch.library.opcheck(ops.norm_backward, (x, None, None, None, g, None, EPS, kind, False))


@every_norm
def test_compiled_norms_match_pytorch(kind: str) -> None:
    def run(function, inputs):
        y, total = function(*inputs, kind)
        # Uses both results; the sum is the next residual.
        y2, total = function(y * 2, total, *inputs[2:], kind)
        loss = y2.square().sum() + total.sin().sum()
        return (y2, total, *torch.autograd.grad(loss, inputs))

    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_close(run(compiled, random_leaves(5, 7)), run(eager, random_leaves(5, 7)))


@every_norm
def test_norm_gradients_match_pytorch_if_one_output_is_unused(kind: str) -> None:
    inputs = random_leaves(3, 7)
    for used in (0, 1):
        found, expected = (function(*inputs, kind)[used].sin().sum() for function in (ours, eager))
        used_inputs = inputs if used == 0 else inputs[:2]
        assert_close(torch.autograd.grad(found, used_inputs), torch.autograd.grad(expected, used_inputs))


def test_layer_norm_gives_gradients_only_to_inputs_that_require_them() -> None:
    x, residual, weight, bias = random_leaves(3, 7)
    y, _ = layer_norm(x.detach(), weight, bias.detach(), residual=residual.detach())
    y.sin().sum().backward()
    assert (x.grad, residual.grad, bias.grad) == (None, None, None)
    assert weight.grad is not None


def test_layer_norm_saves_only_the_sum_and_the_parameters() -> None:
    inputs = random_leaves(3, 7)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, total = layer_norm(inputs[0], *inputs[2:], residual=inputs[1])
    assert [t.shape for t in kept] == [(3, 7), (7,), (7,)]
    assert kept[0].data_ptr() == total.data_ptr()


def test_norms_reject_invalid_arguments() -> None:
    x = torch.randn(3, 7)
    with pytest.raises(ValueError, match=r"x must be a floating-point tensor .*, got \[\]"):
        layer_norm(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"got \[3, 7\] of torch.int64"):
        rms_norm(x.long())
    with pytest.raises(ValueError, match=r"the weight must match the columns of x, \[3, 7\].*got \[3\]"):
        rms_norm(x, torch.randn(3))
    with pytest.raises(ValueError, match=r"the bias .*got \[1, 7\]"):
        layer_norm(x, torch.randn(7), torch.randn(1, 7))
    with pytest.raises(ValueError, match=r"the weight .*torch.int64"):
        layer_norm(x, torch.ones(7, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"residual must have x's shape and dtype, .*got \[7\]"):
        layer_norm(x, residual=torch.randn(7))
    with pytest.raises(ValueError, match=r"residual must have .*got \[3, 7\] of torch.float64"):
        rms_norm(x, residual=x.double())
    with pytest.raises(ValueError, match=r"g must have x's shape and dtype, .*got \[3, 1\]"):
        layer_norm_backward(x, None, None, x[:, :1])
    with pytest.raises(ValueError, match=r"g_sum must have x's shape and dtype, .*got \[1, 7\]"):
        rms_norm_backward(x, None, x, g_sum=x[:1])
