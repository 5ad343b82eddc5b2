"""Layers with attention, whose results are saved while everything else is recomputed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models.gpt import Block
from bench.models.llama import Block as Llama
from gpipe_fast import GPipe
from tests.reference import gradient_like

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, HEADS = 16, 2


class Attention(nn.Module):
    """Attention with a mask, or with queries of which no gradient is needed."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.projection, self._masked = nn.Linear(WIDTH, 3 * WIDTH), masked

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in self.projection(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self._masked else None
        if not self._masked:
            q = q.detach()
        return x + F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


class WithTables(nn.Module):
    """A block of Llama, with tables of rotary positions for every length."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Llama(WIDTH, HEADS, 1, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.ones(WIDTH // HEADS)
        found: Tensor = self.block((x, angles.cos()[None], angles.sin()[None]))[0]
        return found


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GPT": lambda: Block(WIDTH, HEADS),
    "Llama": WithTables,
    "masked": lambda: Attention(True),
    "constant queries": lambda: Attention(False),
    "encoder with dropout": lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.1, batch_first=True),
    "frozen": lambda: Block(WIDTH, HEADS).requires_grad_(False),
    "no attention": lambda: nn.Linear(WIDTH, WIDTH),
}


def run(module: nn.Module, x: Tensor, chunks: int = 1) -> dict[str, Tensor | None]:
    x = x.clone().requires_grad_()
    module.zero_grad()
    output = torch.cat([module(part) for part in x.chunk(chunks)])
    output.backward(gradient_like(output))
    found = {"output": output.detach(), "input": x.grad}
    return found | {name.removeprefix("partition."): p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("checkpoint", ["except_attention", ["except_attention", "never"]])
@pytest.mark.parametrize("second", LAYERS)
@pytest.mark.parametrize("first", LAYERS)
@pytest.mark.sampled(6)
def test_saved_attention_gives_the_numbers_of_everything_recomputed(
    first: str, second: str, checkpoint: str | list[str]
) -> None:
    """Lengths and batch sizes change, so that programs come from templates, too."""
    torch.manual_seed(0)
    layers = nn.Sequential(LAYERS[first](), nn.Linear(WIDTH, WIDTH), LAYERS[second]())
    pipes = [
        GPipe(copy.deepcopy(layers), [2, 1], devices=["cpu"] * 2, chunks=3, checkpoint=mode)
        for mode in ("always", checkpoint)
    ]
    for batch, length in ((6, 5), (6, 7), (6, 9), (7, 12), (2, 12)):
        x = torch.randn(batch, length, WIDTH)
        found = []
        for pipe in pipes:
            torch.manual_seed(1)
            found.append(run(pipe, x))
        expected, ours = found
        different = [name for name, value in expected.items() if not same(value, ours[name])]
        assert different == [], (batch, length)
        if "encoder" not in first + second:  # whose dropout draws from keys in a pipeline
            plain = run(layers, x, 3)
            assert [name for name, value in plain.items() if not same(value, ours[name])] == []


def same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)
