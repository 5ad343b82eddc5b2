"""Micro-batches of which some run in Python, because their layers are new, and others as programs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from gpipe_fast import GPipe
from tests.reference import Result, collect, gradient_like, unequal
from tests.untraceable import WIDTH, without_warnings

pytestmark = pytest.mark.usefixtures("one_thread")

CHUNKS = 3


class Branch(nn.Module):
    """Runs in Python, so that the shapes behind it are known only at run time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if y.sum() > 1e9 else y * 2


class Filter(Branch):
    """Keeps as many rows as the data say, so that sizes vary within a signature."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y[x[:, 0] > 0] if self.training else y


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.mean = self.mean * 0.5 + x.detach().mean(0)
        return x * 2 - self.mean


class FunctionalNorm(nn.Module):
    """Batch norm whose statistics no class of PyTorch owns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, training=self.training)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "cumulative": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "functional": FunctionalNorm,
    "counts": Counts,
    "spectral norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
}
# Batch sizes: sizes of micro-batches that are new, known, or of which only some are new.
SIZES = {
    "growing": (48, 50, 49, 51, 50),
    "shrinking": (51, 50, 48, 47, 50),
    "few": (20, 18, 22, 15, 20, 12),
}


def model(first: type[Branch], kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(first(), LAYERS[kind](), nn.Tanh(), Branch(), LAYERS[kind](), nn.Linear(WIDTH, 2))


def call(module: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> Result:
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    output = run(leaf)
    return collect(module, leaf, output, gradient_like(output))


def total(output: Tensor) -> Tensor:
    return output.square().sum()


def step(module: nn.Module, x: Tensor) -> Result:
    """Runs a step, or its plain loop: the sum of the micro-batches' losses, and its backward."""
    module.zero_grad()
    if isinstance(module, GPipe):
        loss = module.step(x, loss_fn=total, normalizer=1)
    else:
        loss = torch.stack([total(module(c)) for c in x.chunk(CHUNKS)]).sum()
        loss.backward()
    result: Result = {"loss": loss.detach()} | {n: p.grad for n, p in module.named_parameters()}
    return result | {f"buffer {n}": b.clone() for n, b in module.named_buffers()}


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never", 0.5])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("way", ["call", "step"])
@pytest.mark.parametrize("first", [Branch, Filter])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.sampled(6)
def test_every_batch_size_gives_the_numbers_of_the_plain_loop(
    kind: str, first: type[Branch], way: str, sizes: str, checkpoint: str | float
) -> None:
    plain, layers = model(first, kind), model(first, kind)
    pipe = GPipe(layers, [2, 4], devices=["cpu"] * 2, chunks=CHUNKS, checkpoint=checkpoint)
    with without_warnings():
        for index, size in enumerate(SIZES[sizes]):
            x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(index))
            x[::2, 0] = x[::2, 0].abs() + 1  # so that a filter keeps more than one row of every micro-batch
            if way == "call":
                ours = call(pipe, x, pipe)
                expected = call(plain, x, lambda x: torch.cat([plain(c) for c in x.chunk(CHUNKS)]))
            else:
                ours, expected = step(pipe, x), step(plain, x)
            assert unequal(ours, expected) == [], f"batch {index} of size {size}"
