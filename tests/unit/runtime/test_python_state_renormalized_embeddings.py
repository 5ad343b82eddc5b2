"""Embeddings with ``max_norm``, which change a parameter in forward, and several backwards of one call."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.reference import Result, unequal

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


class Twice(nn.Module):
    """Looks up a table twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x) + 2 * self.table(x.flip(1))


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "embedding": lambda: [nn.Embedding(11, 8, max_norm=1.0)],
    "bag": lambda: [nn.EmbeddingBag(11, 8, max_norm=1.0)],
    "sparse": lambda: [nn.Embedding(11, 8, max_norm=1.0, sparse=True)],
    "scaled": lambda: [nn.Embedding(11, 8, max_norm=1.0, scale_grad_by_freq=True)],
    "other norm": lambda: [nn.Embedding(11, 8, max_norm=0.5, norm_type=1.0)],
    "twice": lambda: [Twice()],
    "batch norm": lambda: [nn.Embedding(11, 8, max_norm=1.0), nn.BatchNorm1d(5)],
}
# Equal tokens in all micro-batches: only the first changes the table.
TOKENS = {"equal": lambda: torch.arange(5).repeat(6, 1), "random": lambda: torch.randint(11, (6, 5))}


def _results(model: nn.Module, output: Tensor, num_backwards: int) -> Result:
    found: Result = {"output": output.detach()}
    for number in range(num_backwards):
        loss = output.square().sum() if number == 0 else output.sin().sum()
        loss.backward(retain_graph=number + 1 < num_backwards)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            found |= {f"{number}: {name}": parameter.detach().clone(), f"{number}: of {name}": dense.clone()}
    return found


@pytest.mark.sampled(30)
@pytest.mark.parametrize("num_backwards", [1, 2, 3])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("checkpoint", ["always", "never", "except_last"])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", MODELS)
def test_several_backwards(kind: str, tokens: str, checkpoint: str, chunks: int, num_backwards: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*MODELS[kind](), nn.Linear(8, 8)), TOKENS[tokens]()
    plain = copy.deepcopy(model)
    pipe = GPipe(model, [len(model) - 1, 1], devices=["cpu"] * 2, chunks=chunks, checkpoint=checkpoint)
    expected = _results(plain, torch.cat([plain(c) for c in x.chunk(chunks)]), num_backwards)
    assert unequal(_results(model, pipe(x), num_backwards), expected) == []
