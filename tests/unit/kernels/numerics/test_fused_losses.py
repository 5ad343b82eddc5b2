"""Kernels replace losses and their gradients, however they are spelled, and are as exact as PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.kernels.cross_entropy import launch_gradient, launch_losses
from gpipe_fast.kernels.mean_loss import launch_loss
from tests.unit.kernels.numerics.comparison import DEVICE, needs_kernels
from tests.unit.kernels.numerics.fused_graphs import Compared, compare, trace

pytestmark = needs_kernels

aten = torch.ops.aten
BATCH, LENGTH, CLASSES = 5, 7, 19
FP32, FP16 = torch.float32, torch.float16
LOSS, GRADIENT = "cross-entropy", "gradient of cross-entropy"
Spelling = Callable[..., Tensor]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, CLASSES)


# A loss of logits (batch, length, classes) and of targets (batch * length,).
SPELLINGS: dict[str, Spelling] = {
    "rows": lambda x, t, **how: F.cross_entropy(_rows(x), t, **how),
    "sequences": lambda x, t, **how: F.nll_loss(_rows(x.log_softmax(-1)), t, **how),
    "upcast": lambda x, t, **how: F.cross_entropy(_rows(x.float()), t, **how),
    "upcast rows": lambda x, t, **how: F.cross_entropy(_rows(x).float(), t, **how),
    "upcast sequences": lambda x, t, **how: F.nll_loss(_rows(x.float().log_softmax(-1)), t, **how),
    "upcast log-softmax": lambda x, t, **how: F.nll_loss(_rows(x).log_softmax(-1).float(), t, **how),
    "rounded logits": lambda x, t, **how: F.cross_entropy(_rows(x).half().float(), t, **how),
}
REDUCTIONS: list[dict[str, Any]] = [
    {}, {"ignore_index": 3}, {"reduction": "sum"}, {"reduction": "none", "ignore_index": -7},
]  # fmt: skip


def inputs(dtype: torch.dtype, ignored: int = -100) -> list[Tensor]:
    target = torch.randint(CLASSES, (BATCH * LENGTH,), device=DEVICE)
    target[1:3] = ignored
    return [4 * torch.randn(BATCH, LENGTH, CLASSES, dtype=dtype, device=DEVICE), target]


def names(compared: Compared) -> list[str]:
    """Returns which losses and gradients are replaced; a region may compute the scale."""
    return [each.name for each in compared.fused.replaced if each.name in (LOSS, GRADIENT)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("how", REDUCTIONS, ids=str)
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_losses_and_their_gradients(
    spelling: str, dtype: torch.dtype, how: dict[str, Any], recompute: bool
) -> None:
    given = inputs(dtype, how.get("ignore_index", -100))
    compared = trace(lambda x, t: SPELLINGS[spelling](x, t, **how), given, recompute=recompute)
    assert names(compared) == ([GRADIENT] if recompute else [GRADIENT, LOSS])
    assert not {"aten._log_softmax.default", "aten.nll_loss_forward.default"} & {*compared.left()}
    compare(compared, given)


def test_one_gradient_for_all_rows_is_read_as_often() -> None:
    """The sum of the losses of rows gives a gradient whose elements are one number in memory."""
    given = inputs(FP32)
    compared = trace(lambda x, t: F.cross_entropy(_rows(x), t, reduction="none").sum(), given)
    assert GRADIENT in names(compared)
    compare(compared, given)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_a_saved_log_softmax_stands_for_the_logits(dtype: torch.dtype, reduction: int) -> None:
    def gradient(g: Tensor, log_softmax: Tensor, target: Tensor, total: Tensor) -> Tensor:
        g = aten.nll_loss_backward(g, log_softmax, target, None, reduction, -100, total)
        return aten._log_softmax_backward_data(g, log_softmax, 1, log_softmax.dtype)

    x, target = inputs(dtype)
    g = torch.randn(target.shape if reduction == 0 else (), dtype=dtype, device=DEVICE)
    total = (target != -100).sum().to(dtype)
    given = [g, _rows(x).log_softmax(-1), target, total]
    compared = trace(gradient, given, gradients=False)
    assert names(compared) == [GRADIENT]
    compare(compared, given)


OTHERS: dict[str, Spelling] = {
    "weights of classes": lambda x, t: F.cross_entropy(_rows(x), t, x.detach()[0, 0].exp()),
    "label smoothing": lambda x, t: F.cross_entropy(_rows(x), t, label_smoothing=0.1),
    "classes first": lambda x, t: F.cross_entropy(x.transpose(1, 2), t.view(BATCH, LENGTH)),
    "another dimension": lambda x, t: F.nll_loss(_rows(x).log_softmax(0), t),
    "probabilities": lambda x, t: F.nll_loss(_rows(x), t),
    "other values": lambda x, t: F.nll_loss(_rows(x).log_softmax(-1) * 2, t),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_such_loss_is_left(name: str) -> None:
    given = inputs(FP32, 1)
    compared = trace(OTHERS[name], given)
    assert not names(compared)
    compare(compared, given)


def test_an_empty_loss_launches_nothing() -> None:
    target = torch.empty(0, dtype=torch.int64)
    assert launch_losses(torch.empty(0, 10), target).shape == (0,)
    assert launch_gradient(torch.empty(0, 10), target, torch.ones(())).shape == (0, 10)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("rows", [2047, 5000])
def test_one_program_adds_the_losses_of_all_rows(rows: int, mean: bool) -> None:
    ignored = torch.arange(rows, device=DEVICE) % 8 == 0
    losses = torch.rand(rows, device=DEVICE).masked_fill(ignored, 0.0)
    target = torch.randint(100, (rows,), device=DEVICE).masked_fill(ignored, -7)
    expected = losses.double().sum() / (int((~ignored).sum()) if mean else 1)
    torch.testing.assert_close(
        launch_loss(losses, target, -7, mean, FP32).double(), expected, rtol=1e-6, atol=0
    )
