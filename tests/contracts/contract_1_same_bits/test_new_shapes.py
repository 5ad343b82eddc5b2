"""Micro-batches of which some run in Python, because their layers are new, and others as programs.

Also in calls whose backwards come after the forward of another call, which writes the buffers of the first.
Batch norm of PyTorch writes running statistics without incrementing their versions, so that autograd lets it
write those that an earlier graph has saved. Other writes it does not let pass, and no pipeline does either.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

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


def loop(plain: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([plain(c) for c in x.chunk(CHUNKS)])


def call(module: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> Result:
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    output = run(leaf)
    return collect(module, leaf, output, gradient_like(output))


def state(module: nn.Module) -> Result:
    """Returns the gradients and the buffers."""
    gradients = {f"gradient of {n}": p.grad for n, p in module.named_parameters()}
    return {**gradients, **{f"buffer {n}": b.clone() for n, b in module.named_buffers()}}


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
    return {"loss": loss.detach(), **state(module)}


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
                expected = call(plain, x, partial(loop, plain))
            else:
                ours, expected = step(pipe, x), step(plain, x)
            assert unequal(ours, expected) == [], f"batch {index} of size {size}"


# By mini-batch: the batch sizes of the calls in flight. Of some, micro-batches are new, of others known.
IN_FLIGHT = {
    "pairs": ((12, 12), (12, 12), (14, 14), (14, 12)),
    "growing": ((12, 13, 14), (14, 15, 16)),
    "new second": ((12,), (12, 14), (15, 12), (12, 15)),
}
ORDERS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {"forwards": list, "reversed": lambda x: x[::-1]}


def calls(module: nn.Module, run: Callable[[Tensor], Tensor], inputs: list[Tensor], order: str) -> Result:
    """Runs all forwards, then all backwards, in the order of the forwards or in the reverse order."""
    module.zero_grad()
    outputs = [run(x) for x in inputs]
    for output in ORDERS[order](outputs):
        output.backward(gradient_like(output))
    return {**{f"output {i}": output.detach() for i, output in enumerate(outputs)}, **state(module)}


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never", 0.5])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", IN_FLIGHT)
@pytest.mark.parametrize("balance", [[2, 4], [1, 5], [4, 2]])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.sampled(6)
def test_forwards_before_backwards_give_the_numbers_of_the_plain_loop(
    kind: str, balance: list[int], sizes: str, order: str, checkpoint: str | float
) -> None:
    plain, layers = model(Branch, kind), model(Branch, kind)
    pipe = GPipe(layers, balance, devices=["cpu"] * 2, chunks=CHUNKS, checkpoint=checkpoint)
    generator = torch.Generator().manual_seed(0)
    with without_warnings():
        for batch_sizes in IN_FLIGHT[sizes]:
            inputs = [torch.randn(size, WIDTH, generator=generator) for size in batch_sizes]
            expected = calls(plain, partial(loop, plain), inputs, order)
            assert unequal(calls(pipe, pipe, inputs, order), expected) == [], batch_sizes


@pytest.mark.parametrize("kind", ["batch norm", "functional"])
def test_a_graph_outside_of_the_pipeline_may_have_saved_the_statistics(kind: str) -> None:
    """Also one of layers that are all lowered."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), LAYERS[kind](), nn.Linear(WIDTH, 2))
    plain, x = copy.deepcopy(layers), torch.randn(12, WIDTH)
    pipe = GPipe(layers, [1, 2], devices=["cpu"] * 2, chunks=CHUNKS, backend="aten")
    for _ in range(2):
        results = []
        for module, run in ((pipe, pipe), (plain, partial(loop, plain))):
            module.zero_grad()
            outside = nn.Sequential(*module)(x)
            run(x).square().sum().backward()
            outside.square().sum().backward()
            results.append({n: p.grad for n, p in module.named_parameters()})
        assert unequal(*results) == []


class Scaled(nn.Module):
    """Multiplies by a buffer that it writes, so that the backward reads the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(0.5).add_(x.detach().abs().mean(0))
        return x * self.scale


def test_a_buffer_that_a_backward_reads_may_not_be_written_before_it() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(), nn.Linear(WIDTH, 2))
    pipe = GPipe(layers, [1, 2], devices=["cpu"] * 2, chunks=CHUNKS, backend="aten")
    x = torch.randn(12, WIDTH)
    for _ in range(2):
        outside = nn.Sequential(*pipe)(x)
        pipe(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            outside.sum().backward()
