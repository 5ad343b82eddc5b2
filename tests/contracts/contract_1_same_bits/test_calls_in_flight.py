"""Calls whose backwards come after the forward of another call, which writes the buffers of the first.

Batch norm of PyTorch writes running statistics without incrementing their versions, so that autograd lets it
write those that an earlier graph has saved. Other writes it does not let pass, and no pipeline does either.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.contracts.contract_1_same_bits.test_new_shapes import CHUNKS, LAYERS, Branch, model
from tests.reference import Result, gradient_like, unequal
from tests.untraceable import WIDTH, without_warnings

pytestmark = pytest.mark.usefixtures("one_thread")

# By mini-batch: the batch sizes of the calls in flight. Of some, micro-batches are new, of others known.
SIZES = {
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
    result: Result = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    result |= {f"gradient of {n}": p.grad for n, p in module.named_parameters()}
    return result | {f"buffer {n}": b.clone() for n, b in module.named_buffers()}


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never", 0.5])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("balance", [[2, 4], [1, 5], [4, 2]])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.sampled(6)
def test_forwards_before_backwards_give_the_numbers_of_the_plain_loop(
    kind: str, balance: list[int], sizes: str, order: str, checkpoint: str | float
) -> None:
    plain, layers = model(Branch, kind), model(Branch, kind)
    pipe = GPipe(layers, balance, devices=["cpu"] * 2, chunks=CHUNKS, checkpoint=checkpoint)
    generator = torch.Generator().manual_seed(0)

    def loop(x: Tensor) -> Tensor:
        return torch.cat([plain(c) for c in x.chunk(CHUNKS)])

    with without_warnings():
        for batch_sizes in SIZES[sizes]:
            inputs = [torch.randn(size, WIDTH, generator=generator) for size in batch_sizes]
            expected = calls(plain, loop, inputs, order)
            assert unequal(calls(pipe, pipe, inputs, order), expected) == [], batch_sizes


@pytest.mark.parametrize("kind", ["batch norm", "functional"])
def test_a_graph_outside_of_the_pipeline_may_have_saved_the_statistics(kind: str) -> None:
    """Also one of layers that are all lowered."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), LAYERS[kind](), nn.Linear(WIDTH, 2))
    plain, x = copy.deepcopy(layers), torch.randn(12, WIDTH)
    pipe = GPipe(layers, [1, 2], devices=["cpu"] * 2, chunks=CHUNKS, backend="aten")

    def loop(x: Tensor) -> Tensor:
        return torch.cat([plain(c) for c in x.chunk(CHUNKS)])

    for _ in range(2):
        results = []
        for module, run in ((pipe, pipe), (plain, loop)):
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
