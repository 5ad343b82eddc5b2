"""The last linear layer with softmax cross-entropy, in chunks of rows, against PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.kernels import linear_cross_entropy
from tests.unit.kernels.numerics.comparison import (
    check,
    every_dtype,
    needs_kernels,
    noncontiguous,
    outputs_and_gradients,
    to_float64,
)

OPTIONS = ({}, {"reduction": "sum", "label_smoothing": 0.1}, {"ignore_index": 0, "label_smoothing": 0.1})
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def eager(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options) -> Tensor:
    """Returns PyTorch's loss of logits in fp32 or wider."""
    logits = F.linear(x.flatten(0, -2), weight, bias)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, target.flatten(), **options)


def compare_with_pytorch(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, chunk_rows: int, **options
) -> None:
    inputs = [x, weight] if bias is None else [x, weight, bias]
    # A power of two adds no rounding; the order in which matrix products sum already depends on the shape.
    g = [torch.tensor(-4.0)]

    def own(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_cross_entropy(x, weight, target, bias, chunk_rows=chunk_rows, **options)

    def other(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return eager(x, weight, target, bias, **options)

    check(
        outputs_and_gradients(own, inputs, g),
        outputs_and_gradients(other, inputs, g),
        outputs_and_gradients(other, to_float64(inputs), g),
    )


def random_inputs(
    rows: int, features: int, classes: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns x, weight, targets and bias, with few bits: no summation order changes the logits."""
    x, weight, bias = (torch.randint(-8, 9, s) for s in ((rows, features), (classes, features), (classes,)))
    return (x / 4).to(dtype), (weight / 16).to(dtype), torch.randint(classes, (rows,)), (bias / 4).to(dtype)


@every_dtype
@every_option
@pytest.mark.parametrize("classes", [1, 63, 1000, 4097])
def test_linear_cross_entropy_matches_pytorch_for_every_number_of_classes(
    classes: int, options: dict[str, object], dtype: torch.dtype
) -> None:
    x, weight, target, bias = random_inputs(23, 20, classes, dtype)
    target[:2] = options.get("ignore_index", -100)
    target[2] = classes - 1
    if classes == 1 and options.get("ignore_index") == 0:
        options = {**options, "ignore_index": -100}
    compare_with_pytorch(x, weight, target, bias, 8, **options)


@every_dtype
@pytest.mark.parametrize("chunk_rows", [1, 7, 22, 100])
def test_linear_cross_entropy_matches_pytorch_for_every_chunk_size(
    chunk_rows: int, dtype: torch.dtype
) -> None:
    x, weight, target, bias = random_inputs(23, 20, 63, dtype)
    compare_with_pytorch(x, weight, target, bias, chunk_rows)
    compare_with_pytorch(x, weight, target, None, chunk_rows)


@every_dtype
def test_linear_cross_entropy_of_noncontiguous_tensors_matches_pytorch(dtype: torch.dtype) -> None:
    x, weight, target, bias = random_inputs(24, 20, 63, dtype)
    deep_x, deep_target = x.view(4, 6, 20), target.view(4, 6)
    compare_with_pytorch(deep_x, weight, deep_target, bias, 7)
    compare_with_pytorch(deep_x.transpose(0, 1), weight, deep_target.t(), bias, 7)
    compare_with_pytorch(noncontiguous(x), noncontiguous(weight), target, noncontiguous(bias), 7)
    compare_with_pytorch(x, weight.t().contiguous().t(), target, bias, 7)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_linear_cross_entropy_of_no_rows_has_zero_gradients(reduction: str) -> None:
    x, weight, target, bias = (
        t.requires_grad_(t.is_floating_point()) for t in random_inputs(0, 5, 7, torch.float32)
    )
    loss = linear_cross_entropy(x, weight, target, bias, reduction=reduction)
    loss.backward()
    torch.testing.assert_close(
        loss, torch.tensor(0.0 if reduction == "sum" else float("nan")), equal_nan=True
    )
    assert x.grad.shape == x.shape
    assert torch.equal(weight.grad, torch.zeros(7, 5))
    assert torch.equal(bias.grad, torch.zeros(7))


@needs_kernels
def test_a_target_out_of_range_makes_the_linear_cross_entropy_nan() -> None:
    x, weight, target, _ = random_inputs(9, 5, 7, torch.float32)
    target[4] = 7
    x.requires_grad_()
    loss = linear_cross_entropy(x, weight, target, chunk_rows=2)
    loss.backward()
    assert loss.isnan()
    assert torch.equal(x.grad.isnan().all(1), torch.arange(9) == 4)
