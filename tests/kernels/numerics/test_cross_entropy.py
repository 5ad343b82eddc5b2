"""Softmax cross-entropy, its gradient made by the forward."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.kernels import cross_entropy
from gpipe_fast.kernels.launch import Config
from tests.kernels.numerics.comparison import (
    check,
    doubles,
    every_dtype,
    every_width,
    needs_kernels,
    strided,
    with_gradients,
)

OPTIONS = (
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "ignore_index": 0},
    {"reduction": "mean", "label_smoothing": 1.0, "ignore_index": 0},
)
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def in_fp32(logits: Tensor, target: Tensor, **options) -> Tensor:
    """PyTorch's own, of logits in fp32 at least; its gradient is rounded to the dtype of the logits."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat = F.cross_entropy(wide.reshape(-1, logits.shape[-1]), target.reshape(-1), **options)
    return flat.view(target.shape) if options.get("reduction") == "none" else flat


def compare(logits: Tensor, target: Tensor, *, by: float | None = None, **options) -> None:
    """Beside the logits and in place; the incoming gradient is random, or what is given."""
    shape = target.shape if options.get("reduction") == "none" else ()
    g = torch.randn(shape) if by is None else torch.full(shape, by)
    eager = with_gradients(lambda x: in_fp32(x, target, **options), [logits], [g])
    truth = with_gradients(lambda x: in_fp32(x, target, **options), doubles([logits]), [g])
    ours = with_gradients(lambda x: cross_entropy(x, target, **options), [logits], [g])
    check(ours, eager, truth)
    logits_made = []

    def in_place(leaf: Tensor) -> Tensor:
        logits_made.append(_Strided.apply(leaf, logits.stride()))
        return cross_entropy(logits_made[0], target, inplace=True, **options)

    again = with_gradients(in_place, [logits], [g])
    torch.testing.assert_close(again, ours, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(logits_made[0], again[1])


class _Strided(torch.autograd.Function):
    """A copy with strides of its own, gaps among them: what a layer would compute."""

    @staticmethod
    def forward(ctx, values, strides):
        return torch.empty_strided(values.shape, strides, dtype=values.dtype).copy_(values)

    @staticmethod
    def backward(ctx, g):
        return g.clone(), None


def some(cols: int, dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    return 4 * torch.randn(*shape, cols, dtype=dtype), torch.randint(cols, shape)


@every_dtype
@every_width
@every_option
def test_sizes(options: dict[str, object], cols: int, dtype: torch.dtype) -> None:
    logits, target = some(cols, dtype, 3, 3)
    target[0, :2] = options.get("ignore_index", -100)
    compare(logits, target, **options)


@every_dtype
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_incoming_gradient_of_one(reduction: str, dtype: torch.dtype) -> None:
    compare(*some(100, dtype, 3, 7), by=1.0, reduction=reduction)


@every_dtype
@every_option
@pytest.mark.parametrize("cols", [1, 63, 128, 129, 1000])
def test_rows_longer_than_a_block(
    cols: int, options: dict[str, object], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = importlib.import_module("gpipe_fast.kernels.cross_entropy")
    monkeypatch.setattr(family, "CONFIGS", {1 << 62: Config({"COLS": 128})})
    logits, target = some(cols, dtype, 5)
    target[3] = options.get("ignore_index", -100)
    logits[2] += torch.linspace(-100, 100, cols)
    compare(logits, target, **options)
    compare(logits.flip(-1), target, **options)


@every_dtype
@pytest.mark.parametrize("cols", [32768, 32769])
def test_the_widest_rows(cols: int, dtype: torch.dtype) -> None:
    logits, target = some(cols, dtype, 2)
    compare(logits, target, label_smoothing=0.1)


@every_dtype
def test_layouts(dtype: torch.dtype) -> None:
    logits, target = some(100, dtype, 4, 5)
    compare(strided(logits), target)
    compare(logits.transpose(0, 1), target.t())
    compare(logits[:1, :1].expand(4, 5, 100).contiguous(), target[::2].repeat(2, 1), reduction="none")
    compare(logits[0, 0], target[0, 0])
    padded = torch.full((4, 5, 112), float("nan"), dtype=dtype)
    padded[..., :100] = logits
    compare(padded[..., :100], target, reduction="sum")


@pytest.mark.parametrize("config", [Config({"ROWS": 4, "COLS": 128}), Config({"COLS": 32})], ids=str)
def test_padding_is_left_alone(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    family = importlib.import_module("gpipe_fast.kernels.cross_entropy")
    monkeypatch.setattr(family, "CONFIGS", {1 << 62: config})
    leaf = torch.randn(4, 5, 112, requires_grad=True)
    padded = leaf.clone()
    for g in (1.0, 2.0):
        cross_entropy(padded[..., :100], torch.randint(100, (4, 5)), inplace=True).backward(torch.tensor(g))
        assert torch.equal(padded[..., :100], leaf.grad[..., :100])
        assert torch.equal(padded[..., 100:], leaf[..., 100:])
        leaf.grad, padded = None, leaf.clone()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(0, 7), (0, 0), (3, 0, 5)])
def test_nothing(shape: tuple[int, ...], reduction: str) -> None:
    logits, target = torch.randn(shape, requires_grad=True), torch.zeros(shape[:-1], dtype=torch.int64)
    loss = cross_entropy(logits, target, reduction=reduction)
    expected = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction=reduction).view(loss.shape)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0, equal_nan=True)
    loss.sum().backward()
    assert logits.grad.shape == logits.shape


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_ignored(smoothing: float) -> None:
    logits, target = torch.randn(5, 7, requires_grad=True), torch.full((5,), -100)
    loss = cross_entropy(logits, target, label_smoothing=smoothing)
    loss.backward()
    assert loss.isnan()
    assert torch.equal(logits.grad, torch.zeros(5, 7))


@needs_kernels
@pytest.mark.parametrize("config", [Config({"ROWS": 4, "COLS": 16}), Config({"COLS": 4})], ids=str)
def test_a_target_out_of_range_makes_its_row_nan(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    family = importlib.import_module("gpipe_fast.kernels.cross_entropy")
    monkeypatch.setattr(family, "CONFIGS", {1 << 62: config})
    logits, target = torch.randn(6, 7, requires_grad=True), torch.tensor([0, 7, 6, -1, -100, 1 << 40])
    losses = cross_entropy(logits, target, reduction="none")
    losses.sum().backward()
    wrong = torch.tensor([False, True, False, True, False, True])
    assert torch.equal(losses.isnan(), wrong)
    assert torch.equal(logits.grad.isnan(), wrong[:, None].expand(6, 7))
    assert cross_entropy(logits, target).isnan()


@pytest.mark.parametrize("config", [Config({"ROWS": 4, "COLS": 16}), Config({"COLS": 4})], ids=str)
def test_large_and_infinite_logits(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    family = importlib.import_module("gpipe_fast.kernels.cross_entropy")
    monkeypatch.setattr(family, "CONFIGS", {1 << 62: config})
    logits = torch.tensor([[1e4, -1e4, 0.0, 1e30, -1e30], [-1e4, -1e4, -1e4, -1e4, -1e4]])
    for smoothing in (0.0, 0.1):
        for target in range(5):
            compare(logits, torch.full((2,), target), label_smoothing=smoothing, reduction="none")
    # Classes that are masked out, by which whole blocks are, too.
    logits = torch.full((5, 7), -float("inf"))
    logits[torch.arange(5), torch.arange(5)] = 1.0
    logits[:, 5] = 0.5
    compare(logits, torch.arange(5), reduction="sum")
    for row in (torch.full((1, 7), -float("inf")), torch.tensor([[0.0, float("nan"), 0, 0, 0, 0, 0]])):
        leaf = row.requires_grad_()
        loss = cross_entropy(leaf, torch.tensor([0]))
        loss.backward()
        assert loss.isnan()
        assert leaf.grad.isnan().all()


def test_rows_of_few_columns_are_scaled_each_by_its_own() -> None:
    logits, target = some(3, torch.float32, 2060)
    compare(logits, target, reduction="none")


def test_what_needs_no_gradient_makes_none_and_destroys_nothing() -> None:
    logits, target = some(100, torch.float16, 5)
    kept = logits.clone()
    loss = cross_entropy(logits, target, inplace=True)
    with torch.no_grad():
        again = cross_entropy(logits.requires_grad_(), target, inplace=True)
    assert torch.equal(logits, kept)
    assert torch.equal(loss, again)
    assert torch.equal(loss, cross_entropy(logits, target).detach())
