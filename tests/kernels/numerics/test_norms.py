"""LayerNorm and RMSNorm, with and without residual addition, against PyTorch."""

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
    every_dtype,
    every_width,
    needs_kernels,
    noncontiguous,
    outputs_and_gradients,
    shape_beyond_one_block,
    to_float64,
)

EPS = 1e-5
every_norm = pytest.mark.parametrize("kind", norms.KINDS)
with_and_without_residual = pytest.mark.parametrize(
    "has_residual", [False, True], ids=["no residual", "residual"]
)


def eager(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float = EPS,
) -> tuple[Tensor, ...]:
    """Returns the results of PyTorch's operators: the norm and, with a residual, the sum."""
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
    """Returns the same results from the kernels."""
    if kind == "layer":
        found = layer_norm(x, weight, bias, eps, residual=residual)
    else:
        found = rms_norm(x, weight, eps, residual=residual)
    return (found,) if isinstance(found, Tensor) else found


def fused_backward(
    inputs: list[Tensor | None], g: Tensor, g_sum: Tensor | None, kind: str, eps: float = EPS
) -> list[Tensor | None]:
    """Returns the norm and the gradients of all inputs, computed in one pass."""
    x, residual, weight, bias = inputs
    if kind == "layer":
        return list(layer_norm_backward(x, weight, bias, g, eps, residual, g_sum))
    return [*rms_norm_backward(x, weight, g, eps, residual, g_sum), None]


def compare_with_pytorch(
    inputs: list[Tensor | None], g: Tensor, g_sum: Tensor | None, kind: str, eps: float = EPS
) -> None:
    """Compares forward, backward through autograd, and fused backward with PyTorch's operators."""
    check(*kernel_eager_and_exact_results(inputs, g, g_sum, kind, eps))


def kernel_eager_and_exact_results(
    inputs: list[Tensor | None], g: Tensor, g_sum: Tensor | None, kind: str, eps: float = EPS
) -> list[list[Tensor]]:
    """Returns the results of the kernels, of PyTorch's operators, and of these operators in float64."""
    gradients = [g] if g_sum is None else [g, g_sum]

    def run(function: Callable[..., tuple[Tensor, ...]], tensors: list[Tensor | None]) -> list[Tensor]:
        present = [t for t in tensors if t is not None]

        def call(*given: Tensor) -> tuple[Tensor, ...]:
            remaining = iter(given)
            return function(*(None if t is None else next(remaining) for t in tensors), kind, eps)

        return outputs_and_gradients(call, present, gradients)

    found = run(ours, inputs)
    # The fused backward returns the same norm and gradients, bit for bit.
    again = [found[0], *found[len(gradients) :]]
    once = [t for t in fused_backward(inputs, g, g_sum, kind, eps) if t is not None]
    assert all(torch.equal(a, b) for a, b in zip(again, once, strict=True))
    return [found, run(eager, inputs), run(eager, to_float64(inputs))]


def random_inputs(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str, has_residual: bool
) -> tuple[list[Tensor | None], Tensor, Tensor | None]:
    x, residual, g, g_sum = torch.randn(4, *shape, dtype=dtype)
    weight, bias = torch.randn(2, shape[-1], dtype=dtype)
    inputs = [2 * x + 1, residual if has_residual else None, weight, bias if kind == "layer" else None]
    return inputs, g, g_sum if has_residual else None


def compare_batch_with_pytorch(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str, has_residual: bool
) -> None:
    """Compares several inputs together if they have one row or one column, where one rounding can decide."""
    narrow = shape[-1] == 1 or math.prod(shape[:-1]) == 1
    results = [
        kernel_eager_and_exact_results(*random_inputs(shape, dtype, kind, has_residual), kind)
        for _ in range(8 if narrow else 1)
    ]
    check(*([torch.stack(same) for same in zip(*some, strict=True)] for some in zip(*results, strict=True)))


@every_dtype
@every_width
@with_and_without_residual
@every_norm
def test_norms_match_pytorch_for_every_width(
    kind: str, has_residual: bool, cols: int, dtype: torch.dtype
) -> None:
    compare_batch_with_pytorch(
        shape_beyond_one_block(norms.choose(cols).blocks["ROWS"], cols), dtype, kind, has_residual
    )


@every_dtype
@pytest.mark.parametrize("cols", [norms.MAX_COLUMNS, norms.MAX_COLUMNS + 1])
@every_norm
def test_norms_of_the_widest_rows_match_pytorch(kind: str, cols: int, dtype: torch.dtype) -> None:
    compare_with_pytorch(*random_inputs((3, cols), dtype, kind, True), kind)


@needs_kernels
def test_norms_of_wider_rows_and_of_fp64_use_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the reference was called")

    monkeypatch.setattr(reference, "norm", fail)
    layer_norm(torch.randn(2, norms.MAX_COLUMNS))
    with pytest.raises(AssertionError, match="the reference was called"):
        layer_norm(torch.randn(2, norms.MAX_COLUMNS + 1))
    with pytest.raises(AssertionError, match="the reference was called"):
        rms_norm(torch.randn(2, 7, dtype=torch.float64))


@every_dtype
@pytest.mark.parametrize(("rows", "cols"), [(1, 100), (64, 100), (65, 100), (131, 100), (1, 1500), (9, 1500)])
def test_layer_norm_matches_pytorch_for_every_number_of_rows(
    rows: int, cols: int, dtype: torch.dtype
) -> None:
    """The rows fill one program, all programs, and all programs more than once."""
    compare_batch_with_pytorch((rows, cols), dtype, "layer", True)


@every_dtype
@every_norm
@pytest.mark.parametrize("present", list(product([False, True], repeat=3)))
def test_norms_without_residual_weight_or_bias_match_pytorch(
    present: tuple[bool, ...], kind: str, dtype: torch.dtype
) -> None:
    if kind == "rms" and present[2]:
        pytest.skip("RMSNorm has no bias")
    inputs, g, g_sum = random_inputs((5, 100), dtype, "layer", True)
    inputs = [
        inputs[0],
        *(t if is_present else None for t, is_present in zip(inputs[1:], present, strict=True)),
    ]
    compare_with_pytorch(inputs, g, g_sum if present[0] else None, kind)


@every_dtype
@every_norm
def test_norm_backward_accepts_a_precomputed_sum_and_a_gradient_of_one_output(
    kind: str, dtype: torch.dtype
) -> None:
    inputs, g, g_sum = random_inputs((5, 100), dtype, kind, True)
    _, residual, *parameters = inputs
    total = residual + inputs[0]
    expected = fused_backward(inputs, g, g_sum, kind)
    expected[2] = None
    for own, other in zip(fused_backward([total, None, *parameters], g, g_sum, kind), expected, strict=True):
        assert (own is None and other is None) or torch.equal(own, other)
    # With a gradient of the norm only, and of the sum only.
    x = inputs[0].clone().requires_grad_()
    (y, total) = ours(x, residual, *parameters, kind)
    (dx,) = torch.autograd.grad(y, x, g, retain_graph=True)
    assert torch.equal(dx, fused_backward(inputs, g, None, kind)[1])
    (dx,) = torch.autograd.grad(total, x, g_sum)
    assert torch.equal(dx, g_sum)


@every_dtype
@every_norm
def test_norms_of_noncontiguous_tensors_match_pytorch(kind: str, dtype: torch.dtype) -> None:
    inputs, g, g_sum = random_inputs((4, 5, 100), dtype, kind, True)
    compare_with_pytorch(
        [t if t is None else noncontiguous(t) for t in inputs], noncontiguous(g), noncontiguous(g_sum), kind
    )
    x, residual, *parameters = inputs
    transposed = [x.transpose(0, 1), residual.transpose(0, 1), *parameters]
    compare_with_pytorch(transposed, g.transpose(0, 1), g_sum.transpose(0, 1), kind)
    compare_with_pytorch(inputs, g[:1, :1, :1].expand(4, 5, 100), g_sum[:, :1].expand(4, 5, 100), kind)
    compare_with_pytorch([x[0, 0], residual[0, 0], *parameters], g[0, 0], g_sum[0, 0], kind)


@every_norm
@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (0, 0), (3, 0, 5)])
def test_norms_of_empty_tensors_are_empty(shape: tuple[int, ...], kind: str) -> None:
    inputs, g, g_sum = random_inputs(shape, torch.float32, kind, True)
    y, dx, _, dweight, _ = fused_backward(inputs, g, g_sum, kind)
    assert y.shape == dx.shape == shape
    assert torch.equal(dweight, torch.zeros(shape[-1]))
    assert [t.shape for t in ours(*inputs, kind)] == [shape, shape]


def test_gradients_of_fp32_norm_parameters_stay_fp32_for_fp16_inputs() -> None:
    x, g = torch.randn(2, 5, 100, dtype=torch.float16)
    weight, bias = torch.randn(2, 100)
    y, dx, _, dweight, dbias = layer_norm_backward(x, weight, bias, g)
    assert (y.dtype, dx.dtype) == (torch.float16, torch.float16)
    inputs = [x.double(), None, weight.double(), bias.double()]
    _, _, *truth = outputs_and_gradients(
        lambda x, w, b: eager(x, None, w, b, "layer"), [inputs[0], *inputs[2:]], [g.double()]
    )
    assert (dweight.dtype, dbias.dtype) == (torch.float32, torch.float32)
    # A tolerance far below the precision of fp16.
    torch.testing.assert_close([dweight, dbias], [t.float() for t in truth], rtol=1e-5, atol=1e-5)


@every_norm
def test_norms_of_inputs_far_from_zero_do_not_cancel(kind: str) -> None:
    inputs, g, _ = random_inputs((7, 1000), torch.float32, kind, False)
    compare_with_pytorch([inputs[0] + 1e4, *inputs[1:]], g, None, kind)


@every_norm
def test_padding_rows_of_a_block_add_nothing_to_norm_gradients_if_eps_is_zero(kind: str) -> None:
    """The standard deviation of padding rows is 0; 0 / 0 must not reach the sums over rows."""
    compare_with_pytorch(*random_inputs((35, 100), torch.float32, kind, True), kind, eps=0.0)


def test_layer_norm_of_constant_rows_is_zero() -> None:
    x = torch.tensor([[1.1], [-3e4], [7.7e-5]]).expand(3, 1000).contiguous()
    assert torch.equal(layer_norm(x[:, :1]), torch.zeros(3, 1))
    compare_with_pytorch([x, None, torch.randn(1000), torch.randn(1000)], torch.randn(3, 1000), None, "layer")
