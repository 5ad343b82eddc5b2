"""LayerNorm and RMSNorm, with and without residual add."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.kernels import layer_norm, layer_norm_backward, norms, reference, rms_norm, rms_norm_backward
from tests.kernels.numerics.comparison import (
    check,
    doubles,
    every_dtype,
    every_width,
    needs_kernels,
    rows_beyond,
    strided,
    with_gradients,
)

EPS = 1e-5
every_kind = pytest.mark.parametrize("kind", norms.KINDS)
with_and_without = pytest.mark.parametrize("streamed", [False, True], ids=["plain", "residual"])


def eager(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float = EPS,
) -> tuple[Tensor, ...]:
    """PyTorch's own operators."""
    total = x if residual is None else residual + x
    if kind == "layer":
        y = F.layer_norm(total, total.shape[-1:], weight, bias, eps)
    else:
        y = F.rms_norm(total, total.shape[-1:], weight, eps)
    return (y,) if residual is None else (y, total)


def ours(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float = EPS,
) -> tuple[Tensor, ...]:
    """The kernels."""
    if kind == "layer":
        found = layer_norm(x, weight, bias, eps, residual=residual)
    else:
        found = rms_norm(x, weight, eps, residual=residual)
    return (found,) if isinstance(found, Tensor) else found


def fused(
    inputs: list[Tensor | None], g: Tensor, g_sum: Tensor | None, kind: str, eps: float = EPS
) -> list[Tensor | None]:
    """Y, and the gradients of all inputs, in one pass."""
    x, residual, weight, bias = inputs
    if kind == "layer":
        return list(layer_norm_backward(x, weight, bias, g, eps, residual, g_sum))
    return [*rms_norm_backward(x, weight, g, eps, residual, g_sum), None]


def compare(
    inputs: list[Tensor | None], g: Tensor, g_sum: Tensor | None, kind: str, eps: float = EPS
) -> None:
    """Forward, backward through autograd, and the fused backward, against PyTorch's own."""
    check(*three(inputs, g, g_sum, kind, eps))


def three(
    inputs: list[Tensor | None], g: Tensor, g_sum: Tensor | None, kind: str, eps: float = EPS
) -> list[list[Tensor]]:
    """What the kernels return, what PyTorch does, and the truth."""
    gradients = [g] if g_sum is None else [g, g_sum]

    def run(function: Callable[..., tuple[Tensor, ...]], tensors: list[Tensor | None]) -> list[Tensor]:
        present = [t for t in tensors if t is not None]

        def placed(*given: Tensor) -> tuple[Tensor, ...]:
            left = iter(given)
            return function(*(None if t is None else next(left) for t in tensors), kind, eps)

        return with_gradients(placed, present, gradients)

    found = run(ours, inputs)
    # The fused backward's y and gradients are those, bit for bit.
    again = [found[0], *found[len(gradients) :]]
    once = [t for t in fused(inputs, g, g_sum, kind, eps) if t is not None]
    assert all(torch.equal(a, b) for a, b in zip(again, once, strict=True))
    return [found, run(eager, inputs), run(eager, doubles(inputs))]


def problem(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str, streamed: bool
) -> tuple[list[Tensor | None], Tensor, Tensor | None]:
    x, residual, g, g_sum = torch.randn(4, *shape, dtype=dtype)
    weight, bias = torch.randn(2, shape[-1], dtype=dtype)
    inputs = [2 * x + 1, residual if streamed else None, weight, bias if kind == "layer" else None]
    return inputs, g, g_sum if streamed else None


def compare_many(shape: tuple[int, ...], dtype: torch.dtype, kind: str, streamed: bool) -> None:
    """As `compare`. One row has one deviation and one column one weight: a rounding would decide alone."""
    narrow = shape[-1] == 1 or math.prod(shape[:-1]) == 1
    results = [three(*problem(shape, dtype, kind, streamed), kind) for _ in range(8 if narrow else 1)]
    check(*([torch.stack(same) for same in zip(*some, strict=True)] for some in zip(*results, strict=True)))


@every_dtype
@every_width
@with_and_without
@every_kind
def test_sizes(kind: str, streamed: bool, cols: int, dtype: torch.dtype) -> None:
    compare_many(rows_beyond(norms.choose(cols).blocks["ROWS"], cols), dtype, kind, streamed)


@every_dtype
@pytest.mark.parametrize("cols", [norms.WIDEST, norms.WIDEST + 1])
@every_kind
def test_widest_rows(kind: str, cols: int, dtype: torch.dtype) -> None:
    compare(*problem((3, cols), dtype, kind, True), kind)


@needs_kernels
def test_the_reference_computes_wider_rows_and_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the reference was asked")

    monkeypatch.setattr(reference, "norm", refuse)
    layer_norm(torch.randn(2, norms.WIDEST))
    with pytest.raises(AssertionError, match="the reference was asked"):
        layer_norm(torch.randn(2, norms.WIDEST + 1))
    with pytest.raises(AssertionError, match="the reference was asked"):
        rms_norm(torch.randn(2, 7, dtype=torch.float64))


@every_dtype
@pytest.mark.parametrize(("rows", "cols"), [(1, 100), (64, 100), (65, 100), (131, 100), (1, 1500), (9, 1500)])
def test_rows(rows: int, cols: int, dtype: torch.dtype) -> None:
    """Of one program, of all of them, and of all of them more than once."""
    compare_many((rows, cols), dtype, "layer", True)


@every_dtype
@every_kind
@pytest.mark.parametrize("present", list(product([False, True], repeat=3)))
def test_what_is_not_there(present: tuple[bool, ...], kind: str, dtype: torch.dtype) -> None:
    if kind == "rms" and present[2]:
        pytest.skip("RMSNorm has no bias")
    inputs, g, g_sum = problem((5, 100), dtype, "layer", True)
    inputs = [inputs[0], *(t if there else None for t, there in zip(inputs[1:], present, strict=True))]
    compare(inputs, g, g_sum if present[0] else None, kind)


@every_dtype
@every_kind
def test_gradients_of_the_sum_that_comes_in_alone_and_of_one_output_alone(
    kind: str, dtype: torch.dtype
) -> None:
    inputs, g, g_sum = problem((5, 100), dtype, kind, True)
    _, residual, *parameters = inputs
    total = residual + inputs[0]
    expected = fused(inputs, g, g_sum, kind)
    expected[2] = None
    for own, other in zip(fused([total, None, *parameters], g, g_sum, kind), expected, strict=True):
        assert (own is None and other is None) or torch.equal(own, other)
    # Without a gradient of the sum, and without one of the norm.
    x = inputs[0].clone().requires_grad_()
    (y, total) = ours(x, residual, *parameters, kind)
    (dx,) = torch.autograd.grad(y, x, g, retain_graph=True)
    assert torch.equal(dx, fused(inputs, g, None, kind)[1])
    (dx,) = torch.autograd.grad(total, x, g_sum)
    assert torch.equal(dx, g_sum)


@every_dtype
@every_kind
def test_layouts(kind: str, dtype: torch.dtype) -> None:
    inputs, g, g_sum = problem((4, 5, 100), dtype, kind, True)
    compare([t if t is None else strided(t) for t in inputs], strided(g), strided(g_sum), kind)
    x, residual, *parameters = inputs
    turned = [x.transpose(0, 1), residual.transpose(0, 1), *parameters]
    compare(turned, g.transpose(0, 1), g_sum.transpose(0, 1), kind)
    compare(inputs, g[:1, :1, :1].expand(4, 5, 100), g_sum[:, :1].expand(4, 5, 100), kind)
    compare([x[0, 0], residual[0, 0], *parameters], g[0, 0], g_sum[0, 0], kind)


@every_kind
@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (0, 0), (3, 0, 5)])
def test_nothing(shape: tuple[int, ...], kind: str) -> None:
    inputs, g, g_sum = problem(shape, torch.float32, kind, True)
    y, dx, _, dweight, _ = fused(inputs, g, g_sum, kind)
    assert y.shape == dx.shape == shape
    assert torch.equal(dweight, torch.zeros(shape[-1]))
    assert [t.shape for t in ours(*inputs, kind)] == [shape, shape]


def test_parameters_keep_a_dtype_of_their_own() -> None:
    x, g = torch.randn(2, 5, 100, dtype=torch.float16)
    weight, bias = torch.randn(2, 100)
    y, dx, _, dweight, dbias = layer_norm_backward(x, weight, bias, g)
    assert (y.dtype, dx.dtype) == (torch.float16, torch.float16)
    inputs = [x.double(), None, weight.double(), bias.double()]
    _, _, *truth = with_gradients(
        lambda x, w, b: eager(x, None, w, b, "layer"), [inputs[0], *inputs[2:]], [g.double()]
    )
    assert (dweight.dtype, dbias.dtype) == (torch.float32, torch.float32)
    # Far closer than fp16 could say.
    torch.testing.assert_close([dweight, dbias], [t.float() for t in truth], rtol=1e-5, atol=1e-5)


@every_kind
def test_no_digits_cancel_far_from_zero(kind: str) -> None:
    inputs, g, _ = problem((7, 1000), torch.float32, kind, False)
    compare([inputs[0] + 1e4, *inputs[1:]], g, None, kind)


@every_kind
def test_rows_beside_the_tensor_add_nothing_without_eps(kind: str) -> None:
    """Their deviation is 0; 0 / 0 must not reach the sums."""
    compare(*problem((35, 100), torch.float32, kind, True), kind, eps=0.0)


def test_constant_rows_have_no_deviation() -> None:
    x = torch.tensor([[1.1], [-3e4], [7.7e-5]]).expand(3, 1000).contiguous()
    assert torch.equal(layer_norm(x[:, :1]), torch.zeros(3, 1))
    compare([x, None, torch.randn(1000), torch.randn(1000)], torch.randn(3, 1000), None, "layer")
