"""Layers with attention, whose results are saved while everything else is recomputed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models.gpt import Block
from bench.models.llama import Block as Llama
from gpipe_fast import GPipe
from tests.reference import loop_step, pipeline_step, unequal

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


@pytest.mark.parametrize("checkpoint", ["except_attention", ["except_attention", "never"]])
@pytest.mark.parametrize("second", LAYERS)
@pytest.mark.parametrize("first", LAYERS)
@pytest.mark.sampled(6)
def test_saved_attention_gives_the_numbers_of_the_plain_loop(
    first: str, second: str, checkpoint: str | list[str]
) -> None:
    """Lengths and batch sizes change, so that programs come from templates, too."""
    torch.manual_seed(0)
    layers = nn.Sequential(LAYERS[first](), nn.Linear(WIDTH, WIDTH), LAYERS[second]())
    pipe = GPipe(layers, [2, 1], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint)
    for batch, length in ((6, 5), (6, 7), (6, 9), (7, 12), (2, 12)):
        x = torch.randn(batch, length, WIDTH)
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 3)) == [], (batch, length)
