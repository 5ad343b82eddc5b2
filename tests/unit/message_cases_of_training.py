"""Calls of `GPipe.step` that raise errors."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.schedule import Schedule, fill_drain, interleaved
from tests.unit.message_cases import case

X, Y = torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)
OF_ANOTHER_MODEL = torch.optim.SGD(nn.Linear(3, 3).parameters())


def step(
    loss_fn: Any = F.cross_entropy,
    target: Any = Y,
    frozen: bool = False,
    schedule: Any = "gpipe",
    **more: Any,
) -> object:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).requires_grad_(not frozen)
    pipe = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, schedule=schedule)
    return pipe.step(X, target=target, loss_fn=loss_fn, **more)


def step_of_an_optimizer(max_norm: Any) -> object:
    layer = nn.Linear(3, 3)
    pipe = GPipe(nn.Sequential(layer), [1], devices=["cpu"])
    optimizer = torch.optim.SGD(layer.parameters())
    return pipe.step(X, target=Y, loss_fn=F.cross_entropy, optimizer=optimizer, max_norm=max_norm)


def step_with_lbfgs() -> object:
    layer = nn.Linear(3, 3)
    pipe = GPipe(nn.Sequential(layer), [1], devices=["cpu"])
    return pipe.step(X, target=Y, loss_fn=F.cross_entropy, optimizer=torch.optim.LBFGS(layer.parameters()))


class Foreign(torch.optim.SGD):
    pass


def drained(make: Any = torch.optim.SGD, has_hook: bool = False) -> object:
    layer = nn.Linear(3, 3)
    if has_hook:
        layer.bias.register_hook(lambda gradient: None)
    optimizer = make(layer.parameters())
    if make is torch.optim.Adam:  # has a hook
        optimizer.register_step_post_hook(lambda *args: None)
    pipe = GPipe(nn.Sequential(layer), [1], devices=["cpu"])
    return pipe.step(X, target=Y, loss_fn=F.cross_entropy, optimizer=optimizer, optimizer_in="drain")


def drained_with_graph() -> object:
    layer = nn.Linear(3, 3)
    pipe = GPipe(nn.Sequential(layer), [1], devices=["cpu"])
    options = {"optimizer": torch.optim.SGD(layer.parameters()), "optimizer_in": "drain"}
    return pipe.step(X * layer.weight.sum(), target=Y, loss_fn=F.cross_entropy, **options)  # type: ignore[arg-type]


def without_gradients() -> object:
    with torch.no_grad():
        return step()


def every_sample(output: Tensor, target: Tensor) -> Tensor:
    return (output - 1).square().sum(1)


DESCENDING = Schedule.from_csv("0F1,0F0,0B1,0B0\n1F1,1F0,1B1,1B0")

OF_TRAINING = [
    case("got '2f2b'", "'gpipe', '1f1b'", step, schedule="2f2b"),
    case("got 3", "a function of the numbers of stages and micro-batches", step, schedule=3),
    case("got int", "by Schedule.of", step, schedule=lambda num_stages, num_microbatches: 3),
    case("has 1 stages and 2", "a function of both numbers", step, schedule=fill_drain(1, 2)),
    case("micro-batches [1, 0] and backwards", "in ascending order", step, schedule=DESCENDING),
    case("micro-batches [0, 1] and no backwards", "", step, schedule=fill_drain(2, 2, backward=False)),
    case("got 3 stages for 2 ranks", "a multiple of 2", interleaved, 3, 2, num_ranks=2),
    case("stage 0 runs on two ranks", "rank 1  >0F1<", Schedule.parse, "0F0\n0F1"),
    case("which are disabled here", "outside of torch.no_grad()", without_gradients),
    case("got int", "cross_entropy", step, 3),
    case("the divisor of <lambda> is not known", "pass normalizer=", step, lambda a, b: a.sum()),
    case("got reduction='none'", "'mean' or 'sum'", step, nn.CrossEntropyLoss(reduction="none")),
    case("[2, 3] and the target of shape [2, 1] differ", "reshape one", step, F.mse_loss, torch.ones(4, 1)),
    case("with one element, got torch.Size([2])", "a sum", step, every_sample, normalizer=1),
    case("of shape [3], but the batch size is 4", "replicate", step, target=Y[:3]),
    case("the target is on meta", ".to('cpu')", step, target=Y.to("meta")),
    case("no parameter and no input that requires one", "model.evaluate", step, frozen=True),
    case("step got no target", "pass target=", step, target=None),
    case(
        "the model has no layers",
        "pass some",
        lambda: GPipe(nn.Sequential(), []).step(X, target=Y, loss_fn=F.mse_loss),
    ),
    case("got type", "torch.optim.AdamW(model.parameters())", step, optimizer=torch.optim.SGD),
    case("none of the optimizer's 2 parameters", "of model.parameters()", step, optimizer=OF_ANOTHER_MODEL),
    case("got float", "torch.amp.GradScaler('cuda'), or 'cpu'", step, scaler=2.0**16),
    case("got str", "the maximum norm", step_of_an_optimizer, "inf"),
    case("at least 0, got -1.0", "pass None", step_of_an_optimizer, -1.0),
    case("at least 0, got nan", "pass None", step_of_an_optimizer, float("nan")),
    case("got 'start'", "'end' or 'drain'", step, optimizer_in="start"),
    case("needs an optimizer", "pass optimizer=", step, optimizer_in="drain"),
    case("Foreign may compute", "pass optimizer_in='end'", drained, Foreign),
    case("does not call hooks of optimizers", "pass optimizer_in='end'", drained, torch.optim.Adam),
    case("before the backward of the input", "x.detach()", drained_with_graph),
    case("got weight=", "normalizer=", step, functools.partial(F.mse_loss, weight=X)),
    case("that requires a gradient", ".detach()", step, target=torch.randn(4, requires_grad=True)),
    case("got a tensor of shape [2]", "return a sum", step, normalizer=torch.ones(2)),
    case("divided by normalizer=0", "such as len(target)", step, every_sample, normalizer=0),
    case("divided by normalizer=nan", "or 1 for the sum", step, every_sample, normalizer=float("nan")),
    case("got str", "a function of the target that returns one", step, every_sample, normalizer="4"),
    case("LBFGS calls a closure several times", "optimizer.step(closure)", step_with_lbfgs),
    case("got tuple", "losses=[]", step, losses=()),
    case("'0.bias' has one", "pass optimizer_in='end'", drained, has_hook=True),
    case("got max_norm=1.0 without one", "pass optimizer=", step, max_norm=1.0),
]
