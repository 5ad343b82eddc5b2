"""The layer of a loss, what it refuses, when two losses are the same, and when an analysis holds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe, replicate
from gpipe_fast.layers.structure import flatten
from gpipe_fast.training import losses
from gpipe_fast.training.losses import LossShares, UserLoss, check_target, loss_layer, loss_of

CPU = torch.device("cpu")
LOGITS = torch.linspace(-2, 2, 40, dtype=torch.float64).view(8, 5)


def test_a_normalizer_divides_a_sum() -> None:
    assert loss_of(F.mse_loss, 3.0).divisor(LOGITS) == 3.0  # type: ignore[misc]
    assert loss_of(F.mse_loss, len).divisor(LOGITS) == 8  # type: ignore[misc]
    assert loss_of(F.mse_loss, 3.0).combines == "sum"
    assert loss_of(F.mse_loss).divisor is None


def weighed(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize(
    "loss_fn",
    [
        F.mse_loss,
        functools.partial(F.mse_loss, reduction="mean"),
        functools.partial(functools.partial(F.mse_loss, target=LOGITS.flip(0))),
        nn.MSELoss(),
        nn.MSELoss(reduction="sum"),
    ],
)
def test_a_normalizer_divides_the_sum_of_a_mean_of_pytorch(loss_fn: Any) -> None:
    target = (
        () if isinstance(loss_fn, functools.partial) and "target" in loss_fn.keywords else (LOGITS.flip(0),)
    )
    found = loss_of(loss_fn, 3).function(LOGITS, *target)
    assert torch.equal(found, F.mse_loss(LOGITS, LOGITS.flip(0), reduction="sum"))
    assert loss_of(weighed, 3).function is weighed


def test_a_missing_target_is_named() -> None:
    check_target(F.mse_loss, LOGITS, "step")
    check_target(lambda output: output.sum(), None, "step")
    check_target(functools.partial(F.mse_loss, target=LOGITS), None, "step")
    with pytest.raises(TypeError, match="step got no target, but mse_loss compares the output with one"):
        check_target(F.mse_loss, None, "step")


def layer_of(total: Any, keeps_output: bool = False, dim: int = 0) -> nn.Module:
    return loss_layer(loss_of(total, 1), None, [], keeps_output, dim, CPU)


def test_the_loss_of_an_output() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(layer_of(torch.sum)(x), torch.tensor([15.0]))
    assert layer_of(torch.sum, dim=1)(x).shape == (1, 1)


def test_losses_in_half_precision_become_float32() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        assert layer_of(torch.sum)(torch.ones(4, dtype=dtype)).dtype == torch.float32
    assert layer_of(torch.sum)(torch.ones(4, dtype=torch.float64)).dtype == torch.float64


class Counted:
    """Counts analyses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number, original = 0, losses.split_loss

        def split_loss(*args: Any) -> Any:
            self.number += 1
            return original(*args)

        monkeypatch.setattr(losses, "split_loss", split_loss)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def test_one_analysis_serves_other_sizes(counted: Counted) -> None:
    loss = UserLoss(lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()), flatten(torch.ones(1))[1])
    shares = LossShares(loss, [0], 0, CPU)
    for batch, length in ((4, 7), (3, 7), (1, 7), (4, 9), (2, 12)):
        shares.prepare(torch.randn(batch, length, 5), [torch.ones(batch, length, dtype=torch.long)])
    assert counted.number == 1
    shares.prepare(torch.randn(4, 7, 5).double(), [torch.ones(4, 7, dtype=torch.long)])
    assert counted.number == 2
    shares.prepare(torch.randn(4, 1, 5).double(), [torch.ones(4, 1, dtype=torch.long)])
    assert counted.number == 3


LOSS = nn.CrossEntropyLoss()


@pytest.mark.parametrize("make", [nn.CrossEntropyLoss, lambda: LOSS.forward])
def test_a_step_analyses_a_loss_once(make: Callable[[], Any], counted: Counted) -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), [1, 1], chunks=3)
    for size in (8, 8, 7, 1, 8):
        loss = make()  # anew; the second one, a method, of one module
        pipe.step(torch.randn(size, 4), target=torch.ones(size, dtype=torch.long), loss_fn=loss)
    assert counted.number == 1


def test_a_target_that_is_no_longer_split_is_another_one() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 3))
    pipe, x, weights = GPipe(layers, [1], chunks=3), torch.randn(3, 4), torch.randn(3, 3)

    def loss(y: Tensor, t: Tensor) -> Tensor:
        return (y * t).square().sum() / t.square().sum()

    def of_columns(y: Tensor, t: Tensor) -> Tensor:
        return (y @ t).square().sum() / t.square().sum()

    for target, function in ((weights, loss), (replicate(weights), of_columns), (weights, loss)):
        found = pipe.step(x, target=target, loss_fn=function)
        torch.testing.assert_close(found, function(layers(x), weights).detach())
    for target in (weights, replicate(weights)):
        found = pipe.step(x, target=target, loss_fn=lambda y, t: y.square().sum() / t.square().sum())
        torch.testing.assert_close(found, layers(x).square().sum().detach() / weights.square().sum())


def test_sizes_in_the_code_of_a_user_are_kept(counted: Counted) -> None:
    loss = UserLoss(lambda y, t: F.mse_loss(y.view(-1, 2, 3).sum(1), t), flatten(torch.ones(1))[1])
    shares = LossShares(loss, [0], 0, CPU)
    shares.prepare(torch.randn(4, 6), [torch.randn(4, 3)])
    found = shares.analysis.measures([torch.randn(8, 3)], 8)
    assert found == []


class Uncertain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(y, t) * torch.exp(-self.scale) + self.scale

    def loss(self, y: Tensor, t: Tensor) -> Tensor:
        return self(y, t)  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("kind", ["module", "method"])
def test_parameters_of_a_loss_get_their_gradients(kind: str, backend: str) -> None:
    torch.manual_seed(0)
    layers, own = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), Uncertain()
    x, y = torch.randn(7, 4), torch.randn(7, 3)
    own(layers(x), y).backward()
    expected = [own.scale.grad, layers[0].weight.grad]
    own.scale.grad = layers[0].weight.grad = None
    pipe = GPipe(layers, [1, 1], chunks=3, backend=backend)
    pipe.step(x, target=y, loss_fn=own if kind == "module" else own.loss)
    torch.testing.assert_close([own.scale.grad, layers[0].weight.grad], expected)


class OfTargets(nn.Module):
    """Computes with parameters and targets alone, too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.centers = kind, nn.Parameter(torch.linspace(0.5, 1, 9).view(3, 3))

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        own, loss = self.centers[t], F.cross_entropy(y, t)
        if self.kind == "penalty":
            return loss + own.square().mean() + (self.centers - 1).square().mean()
        weights = own.mean(1)
        return (weights * F.cross_entropy(y, t, reduction="none")).sum() / weights.sum()


def test_parameters_that_targets_choose_get_their_gradients() -> None:
    torch.manual_seed(0)
    layers, own = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), OfTargets("penalty")
    x, y = torch.randn(7, 4), torch.tensor([0, 1, 2, 2, 1, 0, 1])
    own(layers(x), y).backward()
    expected, own.centers.grad = own.centers.grad, None
    pipe = GPipe(layers, [1, 1], chunks=3)
    pipe.step(x, target=y, loss_fn=own)
    torch.testing.assert_close(own.centers.grad, expected)
    with pytest.raises(ValueError, match="it is not linear in what is added up"):
        pipe.step(x, target=y, loss_fn=OfTargets("weights"))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_a_backward_of_ones_own_is_kept_or_refused(backend: str) -> None:
    torch.manual_seed(0)
    layers, x, y = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), torch.randn(7, 4), torch.randn(7, 3)
    F.mse_loss(Reversed.apply(layers(x)), y).backward()
    expected, layers[0].weight.grad = layers[0].weight.grad, None
    pipe = GPipe(layers, [1, 1], chunks=3, backend=backend)
    try:
        pipe.step(x, target=y, loss_fn=lambda output, target: F.mse_loss(Reversed.apply(output), target))
    except ValueError:
        return
    torch.testing.assert_close(layers[0].weight.grad, expected)


def test_a_loss_that_changes_a_buffer_is_refused() -> None:
    class Counting(nn.MSELoss):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("number", torch.zeros(()))

        def forward(self, y: Tensor, t: Tensor) -> Tensor:
            self.number += 1
            return super().forward(y, t)

    loss, pipe = Counting(), GPipe(nn.Sequential(nn.Linear(4, 3)), [1], chunks=3)
    with pytest.raises(ValueError):
        pipe.step(torch.randn(7, 4), target=torch.randn(7, 3), loss_fn=loss)
    assert loss.number == 0


@pytest.mark.parametrize("name", ["requires_grad", "is_leaf"])
def test_code_that_asks_for_the_graph_of_the_output(name: str) -> None:
    torch.manual_seed(0)
    layers, x, y = nn.Sequential(nn.Linear(4, 3)), torch.randn(7, 4), torch.randn(7, 3)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * (2 if getattr(output, name) else 1)

    found = GPipe(layers, [1], chunks=3).step(x, target=y, loss_fn=loss)
    torch.testing.assert_close(found, loss(layers(x), y).detach())


@pytest.mark.parametrize("dim", [-2, -3])
def test_a_negative_batch_dim_is_that_of_the_target_too(dim: int) -> None:
    torch.manual_seed(0)
    layers, x, y = nn.Sequential(nn.Linear(4, 3)), torch.randn(5, 7, 4), torch.randn(5, 7, 3)
    pipe = GPipe(layers, [1], chunks=3, batch_dim=dim)
    torch.testing.assert_close(pipe.step(x, target=y, loss_fn=F.mse_loss), F.mse_loss(layers(x), y).detach())


def test_a_replaced_tensor_of_a_closure_takes_effect() -> None:
    torch.manual_seed(0)
    layers, weights = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), [torch.tensor([1.0, 2.0, 3.0])]
    pipe, x, y = GPipe(layers, [1, 1], chunks=3), torch.randn(7, 4), torch.tensor([0, 1, 2, 2, 1, 0, 1])

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, weight=weights[0])

    for change in (None, lambda: weights[0].mul_(torch.tensor([3.0, 1.0, 1.0])), lambda: weights.pop()):
        if change is not None:
            change()
        weights[:] = weights or [torch.tensor([0.5, 0.1, 4.0])]
        torch.testing.assert_close(pipe.step(x, target=y, loss_fn=loss), loss(layers(x), y).detach())


def test_the_check_draws_no_random_numbers_of_the_caller() -> None:
    loss = UserLoss(lambda y, t: (F.dropout(y, 1e-12) - t).square().mean(), flatten(torch.ones(1))[1])
    before = torch.get_rng_state()
    LossShares(loss, [0], 0, CPU).prepare(torch.randn(0, 3).new_ones(4, 3), [torch.ones(4, 3)])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_one_micro_batch_may_have_any_loss(backend: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    pipe, x = GPipe(layers, [1, 1], chunks=1, backend=backend), torch.randn(6, 4)
    found = pipe.step(x, loss_fn=lambda y: y.var(0).sum())
    assert torch.equal(found, layers(x).var(0).sum().detach())


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_per_microbatch_takes_the_mean_over_samples(backend: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    pipe, x = GPipe(layers, [1, 1], chunks=3, backend=backend), torch.randn(8, 4)

    def loss(y: Tensor) -> Tensor:
        return y.var(0).sum()

    found = pipe.step(x, loss_fn=loss, loss="per-microbatch")
    expected = sum(loss(layers(part)) * len(part) for part in x.chunk(3)) / 8
    torch.testing.assert_close(found, expected.detach())
