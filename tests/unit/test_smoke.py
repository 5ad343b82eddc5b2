"""Smoke tests for every supported version of torch: training steps of small pipelines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.skip import pop, skippable, stash
from tests.reference import check_step

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("one_thread")]


def test_one_step_equals_the_plain_loop() -> None:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3)]
    head = [nn.Flatten(), nn.Linear(64, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5)]
    check_step(nn.Sequential(*convolutions, *head), torch.randn(8, 3, 6, 6), chunks=4, balance=[3, 3, 3])


def test_attention_and_tied_weights_equal_the_plain_loop() -> None:
    torch.manual_seed(0)
    layers = [nn.Embedding(11, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)]
    head = nn.Linear(16, 11, bias=False)
    head.weight = layers[0].weight
    check_step(nn.Sequential(*layers, head), torch.randint(0, 11, (6, 5)), chunks=3)


def test_a_loss_with_a_target_is_traced_and_equals_the_plain_loop() -> None:
    torch.manual_seed(0)
    layers, x, target = mlp(), torch.randn(8, 4), torch.randn(8, 4)
    pipe = GPipe(layers, [2, 1], devices=["cpu"] * 2, chunks=4, backend="aten")
    loss = pipe.step(x, target=target, loss_fn=squared, normalizer=8)
    found = [parameter.grad for parameter in layers.parameters()]
    pipe.zero_grad()
    losses = [squared(layers(a), b) for a, b in zip(x.chunk(4), target.chunk(4), strict=True)]
    for each in reversed(losses):
        each.div(8).backward()
    assert torch.equal(loss, sum(losses[1:], losses[0]).detach() / 8)
    assert all(map(torch.equal, found, [parameter.grad for parameter in layers.parameters()]))


def test_threads_that_end_may_each_trace() -> None:
    for _ in range(2):
        pipe = GPipe(mlp(), [2, 1], devices=["cpu"] * 2, chunks=4)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(pipe, torch.randn(8, 4)).result()


def test_a_trace_keeps_the_default_device() -> None:
    with torch.device("cpu"):
        pipe, x = GPipe(mlp(), [2, 1], devices=["cpu"] * 2, chunks=4), torch.randn(8, 4)
    with torch.device("meta"):
        pipe(x).sum().backward()
        assert torch.empty(1).is_meta


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return x.tanh()


@skippable(pop=["skip"])
class Pair(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, (yield pop("skip"))


@skippable(pop=["skip"])
class Loop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        for _ in range(1):
            x = x + (yield pop("skip")) * x.tanh()
        return x


class Sum(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + 2 * pair[1]


@pytest.mark.parametrize("layers", [[Pair(), Sum()], [Loop()]], ids=["pair", "loop"])
def test_a_pop_within_an_expression_or_a_loop_is_traced(layers: list[nn.Module]) -> None:
    torch.manual_seed(0)
    pipe = GPipe(nn.Sequential(Stash(), nn.Tanh(), *layers), devices=["cpu"], chunks=1, backend="aten")
    x = torch.randn(4, 3)
    y = x.tanh().tanh()
    assert torch.equal(pipe(x), y + x * (2 if len(layers) == 2 else y.tanh()))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def squared(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target, reduction="sum")
