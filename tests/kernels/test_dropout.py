"""Dropout in kernels/ on the CPU: the reference implementation, operators, errors and torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.kernels import (
    Draw,
    bias_activation,
    bias_activation_backward,
    dropout_add,
    gated_activation,
    gated_activation_backward,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from gpipe_fast.randomness.random import KeyedRandomMode, make_key

KEY = make_key(3, 1, 2)
DRAW = Draw(0.3, KEY, 4, 0)


def eager_dropout_add(h: Tensor, residual: Tensor) -> Tensor:
    """Returns the residual plus PyTorch's dropout, with gpipe_fast's keyed draws."""
    mode = KeyedRandomMode(KEY)
    mode.enter_layer(4)
    with mode:
        return residual + F.dropout(h, 0.3)


def eager_activation_with_dropout(z: Tensor, bias: Tensor) -> Tensor:
    """Returns PyTorch's bias, activation and dropout, with gpipe_fast's keyed draws."""
    return eager_dropout_add(F.gelu(z + bias), torch.zeros_like(z))


def output_and_gradients(function: Any, *inputs: Tensor) -> list[Tensor]:
    """Returns the output of a function, and the gradients of all inputs."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]


def test_dropout_after_an_activation_matches_keyed_eager_dropout() -> None:
    z, bias = torch.randn(5, 37), torch.randn(37)
    ours = output_and_gradients(lambda z, b: bias_activation(z, b, "gelu", DRAW), z, bias)
    torch.testing.assert_close(ours, output_and_gradients(eager_activation_with_dropout, z, bias))
    g = 2 * ours[0]
    torch.testing.assert_close(bias_activation_backward(z, bias, g, "gelu", DRAW), tuple(ours))


def test_dropout_after_a_gated_activation_matches_keyed_eager_dropout() -> None:
    gate, up = torch.randn(2, 5, 37)
    ours = output_and_gradients(lambda x, u: gated_activation(x, u, "silu", DRAW), gate, up)
    torch.testing.assert_close(
        ours,
        output_and_gradients(lambda x, u: eager_dropout_add(F.silu(x) * u, torch.zeros(5, 37)), gate, up),
    )
    g = 2 * ours[0]
    torch.testing.assert_close(gated_activation_backward(gate, up, g, "silu", DRAW), tuple(ours))
    packed = gated_activation(torch.cat([gate, up], -1), None, "silu", DRAW)
    torch.testing.assert_close(packed, ours[0])


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_dropout_before_a_residual_and_a_norm_matches_keyed_eager_dropout(kind: str) -> None:
    h, residual, g_sum = torch.randn(3, 5, 37, dtype=torch.float64)
    parameters = torch.randn(2 if kind == "layer" else 1, 37, dtype=torch.float64).unbind()
    norm = layer_norm if kind == "layer" else rms_norm
    plain = F.layer_norm if kind == "layer" else F.rms_norm

    def ours(h: Tensor, residual: Tensor, *parameters: Tensor) -> Tensor:
        y, total = norm(h, *parameters, eps=1e-5, residual=residual, dropout=DRAW)
        return torch.stack([y, total])

    def theirs(h: Tensor, residual: Tensor, *parameters: Tensor) -> Tensor:
        total = eager_dropout_add(h, residual)
        return torch.stack([plain(total, (37,), *parameters, eps=1e-5), total])

    found = output_and_gradients(ours, h, residual, *parameters)
    torch.testing.assert_close(found, output_and_gradients(theirs, h, residual, *parameters))
    # The fused backward gets the gradients of both results.
    backward = layer_norm_backward if kind == "layer" else rms_norm_backward
    g, g_sum = 2 * found[0]
    fused = backward(h, *parameters, g, 1e-5, residual, g_sum, DRAW)
    torch.testing.assert_close(fused, (found[0][0], *found[1:]))
    # Only the sum has a gradient.
    leaf = h.clone().requires_grad_()
    _, total = norm(leaf, residual=residual, dropout=DRAW)
    assert torch.equal(torch.autograd.grad(total, leaf, g_sum)[0], dropout_add(g_sum, None, *DRAW))


def test_dropout_add_passes_gradcheck_and_gradgradcheck() -> None:
    h, residual = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda h, r: dropout_add(h, r, *DRAW), (h, residual))
    assert torch.autograd.gradgradcheck(lambda h, r: dropout_add(h, r, *DRAW).square(), (h, residual))


@pytest.mark.parametrize("has_residual", [True, False])
def test_dropout_add_passes_opcheck(has_residual: bool) -> None:
    h = torch.randn(5, 37, requires_grad=True)
    residual = torch.randn(5, 37, requires_grad=True) if has_residual else None
    torch.library.opcheck(torch.ops.gpipe_fast.dropout_add.default, (h, residual, *DRAW))


def test_activations_with_dropout_pass_opcheck() -> None:
    z, bias = torch.randn(5, 37, requires_grad=True), torch.randn(37, requires_grad=True)
    torch.library.opcheck(torch.ops.gpipe_fast.bias_activation.default, (z, bias, "gelu", *DRAW))
    inputs = (z.detach(), bias.detach(), torch.randn(5, 37), "gelu", True, *DRAW)
    torch.library.opcheck(torch.ops.gpipe_fast.bias_activation_backward.default, inputs)


def test_gated_activations_and_norms_with_dropout_pass_opcheck() -> None:
    h, residual = torch.randn(2, 5, 37).unbind()
    weight = torch.randn(37)
    ops, opcheck = torch.ops.gpipe_fast, torch.library.opcheck
    opcheck(ops.gated_activation_backward.default, (h, residual, h, "gelu", True, *DRAW))
    for g_sum in (h, None):
        opcheck(
            ops.norm_backward.default,
            (h, residual, weight, None, h, g_sum, 1e-5, "rms", True, *DRAW),
        )
        opcheck(ops.norm_backward.default, (h, None, weight, None, h, g_sum, 1e-5, "rms", False, *DRAW))
    leaves = [t.clone().requires_grad_() for t in (h, residual, weight)]
    opcheck(ops.gated_activation.default, (*leaves[:2], "gelu", *DRAW))
    opcheck(ops.add_norm.default, (*leaves, None, 1e-5, "rms", *DRAW))


def test_compiled_functions_with_dropout_equal_the_eager_ones() -> None:
    def gated_dropout_norm(h: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
        gated = gated_activation(bias_activation(h, bias, "silu", DRAW), h, "gelu", DRAW)
        return layer_norm(dropout_add(gated, residual, *DRAW), residual=residual, dropout=DRAW)[0]

    inputs = (*torch.randn(2, 5, 37), torch.randn(37))
    compiled = torch.compile(gated_dropout_norm, backend="aot_eager", fullgraph=True)
    found, expected = (output_and_gradients(f, *inputs) for f in (compiled, gated_dropout_norm))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_dropout_add_gives_gradients_only_to_inputs_that_require_them() -> None:
    h, residual = torch.randn(2, 5, 37)
    residual.requires_grad_()
    dropout_add(h, residual, *DRAW).sum().backward()
    assert torch.equal(residual.grad, torch.ones(5, 37))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"p": -0.1}, r"p must be in \[0, 1\], but got -0.1"),
        ({"p": float("nan")}, "but got nan"),
        ({"key": KEY.int()}, r"but got torch.int32 of shape \[3\]"),
        ({"key": KEY[:2]}, r"but got torch.int64 of shape \[2\]"),
        ({"key": KEY.repeat(2)[::2]}, "key must be a contiguous int64 tensor"),
        ({"key": KEY.to("meta")}, "key must be on cpu, but is on meta"),
        ({"layer": -1}, "layer must fit 16 bits, but got -1"),
        ({"layer": 1 << 16}, "layer must fit 16 bits, but got 65536"),
        ({"ordinal": 1 << 16}, "at most 65536 random ops, but got ordinal 65536"),
    ],
)
def test_functions_with_dropout_reject_invalid_draws(changed: dict[str, Any], message: str) -> None:
    draw, h = DRAW._replace(**changed), torch.randn(4, 5)
    with pytest.raises(ValueError, match=message):
        dropout_add(h, h, *draw)
    with pytest.raises(ValueError, match=message):
        bias_activation(h, None, "gelu", draw)
    with pytest.raises(ValueError, match=message):
        bias_activation_backward(h, None, h, "gelu", draw)
    with pytest.raises(ValueError, match=message):
        gated_activation(h, h, "gelu", draw)
    with pytest.raises(ValueError, match=message):
        layer_norm(h, residual=h, dropout=draw)


def test_norms_with_dropout_require_a_residual() -> None:
    h = torch.randn(4, 5)
    with pytest.raises(ValueError, match=r"dropout applies to x before .* but residual is None"):
        rms_norm(h, dropout=DRAW)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="but residual is None"):
        layer_norm_backward(h, None, None, h, dropout=DRAW)


@pytest.mark.parametrize("residual", [torch.randn(5, 4), torch.randn(5), torch.randn(4, 5).double()])
def test_dropout_add_rejects_a_residual_of_another_shape_or_dtype(residual: Tensor) -> None:
    with pytest.raises(ValueError, match=r"must be torch.float32 of shape \[4, 5\], got"):
        dropout_add(torch.randn(4, 5), residual, *DRAW)


def test_bias_activation_backward_rejects_a_gradient_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"the gradient must be of shape \[4, 5\], got \[4, 1\]"):
        bias_activation_backward(torch.randn(4, 5), None, torch.randn(4, 1), "gelu", DRAW)


def test_dropout_without_the_extension_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    h, op = torch.randn(4, 5), torch.ops.gpipe_fast.dropout_add
    monkeypatch.setattr(torch.ops, "gpipe_fast", torch.ops.nothing_of_this_name)
    with pytest.raises(RuntimeError, match="import gpipe_fast first"):
        op(h, None, *DRAW)
