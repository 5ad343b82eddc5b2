"""Softmax cross-entropy, whose forward computes the gradient, against PyTorch."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.kernels import cross_entropy
from gpipe_fast.kernels.launch import Config
from tests.unit.kernels.numerics.comparison import (
    DEVICE,
    check,
    every_dtype,
    every_width,
    needs_kernels,
    noncontiguous,
    outputs_and_gradients,
    to_float64,
)

OPTIONS = (
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "ignore_index": 0},
    {"reduction": "mean", "label_smoothing": 1.0, "ignore_index": 0},
)
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def fp32_cross_entropy(logits: Tensor, target: Tensor, **options) -> Tensor:
    """Returns PyTorch's loss, computed in fp32 or wider; its gradient has the dtype of the logits."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat = F.cross_entropy(wide.reshape(-1, logits.shape[-1]), target.reshape(-1), **options)
    return flat.view(target.shape) if options.get("reduction") == "none" else flat


def compare_with_pytorch(
    logits: Tensor, target: Tensor, *, g: float | None = None, roundings: int = 1, **options
) -> None:
    """Compares the out-of-place and the in-place loss; the incoming gradient is random, or `g` everywhere."""
    shape = target.shape if options.get("reduction") == "none" else ()
    gradients = [torch.randn(shape) if g is None else torch.full(shape, g)]
    eager = outputs_and_gradients(lambda x: fp32_cross_entropy(x, target, **options), [logits], gradients)
    truth = outputs_and_gradients(
        lambda x: fp32_cross_entropy(x, target, **options), to_float64([logits]), gradients
    )
    ours = outputs_and_gradients(lambda x: cross_entropy(x, target, **options), [logits], gradients)
    check(ours, eager, truth, roundings)
    copies = []

    def in_place(leaf: Tensor) -> Tensor:
        copies.append(_CopyWithStrides.apply(leaf, logits.stride()))
        return cross_entropy(copies[0], target, inplace=True, **options)

    again = outputs_and_gradients(in_place, [logits], gradients)
    torch.testing.assert_close(again, ours, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(copies[0], again[1])


class _CopyWithStrides(torch.autograd.Function):
    """Copies values to a tensor with the given strides, which may leave gaps, like the output of a layer."""

    @staticmethod
    def forward(ctx, values, strides):
        return torch.empty_strided(values.shape, strides, dtype=values.dtype).copy_(values)

    @staticmethod
    def backward(ctx, g):
        return g.clone(), None


def use_config(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes rows of any length use a configuration."""
    family = importlib.import_module("gpipe_fast.kernels.cross_entropy")
    monkeypatch.setattr(family, "CONFIGS", {1 << 62: config})


def logits_and_targets(cols: int, dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    return 4 * torch.randn(*shape, cols, dtype=dtype), torch.randint(cols, shape)


@every_dtype
@every_width
@every_option
def test_cross_entropy_matches_pytorch_for_every_width(
    options: dict[str, object], cols: int, dtype: torch.dtype
) -> None:
    logits, target = logits_and_targets(cols, dtype, 3, 3)
    target[0, :2] = options.get("ignore_index", -100)
    compare_with_pytorch(logits, target, **options)
    if cols == 100 and "label_smoothing" not in options:
        compare_with_pytorch(logits, target, g=1.0, **options)


@every_dtype
@every_option
@pytest.mark.parametrize("cols", [63, 129, 1000])
def test_cross_entropy_of_rows_longer_than_a_block_matches_pytorch(
    cols: int, options: dict[str, object], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_config(Config({"COLS": 128}), monkeypatch)
    logits, target = logits_and_targets(cols, dtype, 5)
    target[3] = options.get("ignore_index", -100)
    logits[2] += torch.linspace(-100, 100, cols)
    compare_with_pytorch(logits, target, **options)
    compare_with_pytorch(logits.flip(-1), target, **options)


@every_dtype
@pytest.mark.parametrize("cols", [32768, 32769])
def test_cross_entropy_of_the_widest_rows_matches_pytorch(cols: int, dtype: torch.dtype) -> None:
    logits, target = logits_and_targets(cols, dtype, 2)
    compare_with_pytorch(logits, target, label_smoothing=0.1)


needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="takes too long in the interpreter")


@needs_gpu
@every_dtype
@pytest.mark.parametrize(("rows", "cols"), [(38, 32000), (512, 32768), (130, 128256), (1 << 18, 63)])
def test_cross_entropy_of_many_logits_matches_pytorch(rows: int, cols: int, dtype: torch.dtype) -> None:
    compare_with_pytorch(*logits_and_targets(cols, dtype, rows))


@needs_gpu
@pytest.mark.parametrize("inplace", [False, True])
def test_a_cross_entropy_compiled_by_inductor_equals_the_eager_one(inplace: bool) -> None:
    logits, target = logits_and_targets(32000, torch.bfloat16, 32)

    def loss(x: Tensor) -> Tensor:
        return cross_entropy(x * 1.0, target, label_smoothing=0.1, inplace=inplace)

    results = [
        outputs_and_gradients(function, [logits], [torch.ones(())])
        for function in (loss, torch.compile(loss, fullgraph=True))
    ]
    assert all(map(torch.equal, *results))


@every_dtype
def test_cross_entropy_of_noncontiguous_logits_matches_pytorch(dtype: torch.dtype) -> None:
    logits, target = logits_and_targets(100, dtype, 4, 5)
    compare_with_pytorch(noncontiguous(logits), target)
    compare_with_pytorch(logits.transpose(0, 1), target.t())
    compare_with_pytorch(
        logits[:1, :1].expand(4, 5, 100).contiguous(), target[::2].repeat(2, 1), reduction="none"
    )
    compare_with_pytorch(logits[0, 0], target[0, 0])
    padded = torch.full((4, 5, 112), float("nan"), dtype=dtype)
    padded[..., :100] = logits
    compare_with_pytorch(padded[..., :100], target, reduction="sum")


@pytest.mark.parametrize("config", [Config({"ROWS": 4, "COLS": 128}), Config({"COLS": 32})], ids=str)
def test_cross_entropy_in_place_leaves_padding_unchanged(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_config(config, monkeypatch)
    leaf = torch.randn(4, 5, 112, requires_grad=True)
    padded = leaf.clone()
    for g in (1.0, 2.0):
        cross_entropy(padded[..., :100], torch.randint(100, (4, 5)), inplace=True).backward(torch.tensor(g))
        assert torch.equal(padded[..., :100], leaf.grad[..., :100])
        assert torch.equal(padded[..., 100:], leaf[..., 100:])
        leaf.grad, padded = None, leaf.clone()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(0, 7), (0, 0), (3, 0, 5)])
def test_cross_entropy_of_empty_logits_equals_pytorch(shape: tuple[int, ...], reduction: str) -> None:
    logits, target = torch.randn(shape, requires_grad=True), torch.zeros(shape[:-1], dtype=torch.int64)
    loss = cross_entropy(logits, target, reduction=reduction)
    expected = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction=reduction).view(loss.shape)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0, equal_nan=True)
    loss.sum().backward()
    assert logits.grad.shape == logits.shape


def test_cross_entropy_is_nan_and_its_gradient_zero_if_all_targets_are_ignored() -> None:
    logits, target = torch.randn(5, 7, requires_grad=True), torch.full((5,), -100)
    loss = cross_entropy(logits, target, label_smoothing=0.1)
    loss.backward()
    assert loss.isnan()
    assert torch.equal(logits.grad, torch.zeros(5, 7))


@needs_kernels
@pytest.mark.parametrize("config", [Config({"ROWS": 4, "COLS": 16}), Config({"COLS": 4})], ids=str)
def test_a_target_out_of_range_makes_the_loss_and_gradient_of_its_row_nan(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_config(config, monkeypatch)
    logits, target = torch.randn(6, 7, requires_grad=True), torch.tensor([0, 7, 6, -1, -100, 1 << 40])
    losses = cross_entropy(logits, target, reduction="none")
    losses.sum().backward()
    wrong = torch.tensor([False, True, False, True, False, True])
    assert torch.equal(losses.isnan(), wrong)
    assert torch.equal(logits.grad.isnan(), wrong[:, None].expand(6, 7))
    assert cross_entropy(logits, target).isnan()


@pytest.mark.parametrize("config", [Config({"ROWS": 4, "COLS": 16}), Config({"COLS": 4})], ids=str)
def test_cross_entropy_of_large_and_infinite_logits_matches_pytorch(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_config(config, monkeypatch)
    logits = torch.tensor([[1e4, -1e4, 0.0, 1e30, -1e30], [-1e4, -1e4, -1e4, -1e4, -1e4]])
    for smoothing in (0.0, 0.1):
        for target in range(5):
            # A probability of 1 cancels most of the target's weight, which PyTorch adds up otherwise on GPUs.
            roundings = 4 if smoothing and DEVICE == "cuda" else 1
            options = {"label_smoothing": smoothing, "reduction": "none", "roundings": roundings}
            compare_with_pytorch(logits, torch.full((2,), target), **options)
    # Masked classes; some blocks are masked entirely.
    logits = torch.full((5, 7), -float("inf"))
    logits[torch.arange(5), torch.arange(5)] = 1.0
    logits[:, 5] = 0.5
    compare_with_pytorch(logits, torch.arange(5), reduction="sum")
    for row in (torch.full((1, 7), -float("inf")), torch.tensor([[0.0, float("nan"), 0, 0, 0, 0, 0]])):
        leaf = row.requires_grad_()
        loss = cross_entropy(leaf, torch.tensor([0]))
        loss.backward()
        assert loss.isnan()
        assert leaf.grad.isnan().all()


def test_cross_entropy_in_place_leaves_logits_unchanged_if_no_gradient_is_needed() -> None:
    logits, target = logits_and_targets(100, torch.float16, 5)
    kept = logits.clone()
    loss = cross_entropy(logits, target, inplace=True)
    with torch.no_grad():
        again = cross_entropy(logits.requires_grad_(), target, inplace=True)
    assert torch.equal(logits, kept)
    assert torch.equal(loss, again)
    assert torch.equal(loss, cross_entropy(logits, target).detach())
