"""Conjugated and negated tensors: bits that say how to read memory, in layers and across boundaries."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.contracts.contract_1_same_bits.conjugation import (
    TABLES,
    Names,
    layers_of,
    names_of_operators,
    noise,
    takes_complex,
)
from tests.reference import loop_step, pipeline_step, plain_loop, restored, unequal

pytestmark = pytest.mark.usefixtures("one_thread")  # PyTorch's ihfft depends on the number of threads

NUM_CASES = 400


def input_of(draw: random.Random, layers: list[Names], dtype: torch.dtype, size: int = 6) -> Tensor:
    return noise(draw, (size, 4), dtype if takes_complex(layers) else dtype.to_real())


def gradient_of(draw: random.Random, layers: list[Names], x: Tensor) -> Tensor:
    real = x.dtype.to_real() if x.is_complex() else x.dtype
    is_complex = layers[-1][-1][0] in ("complex", "to complex")
    return noise(draw, (len(x), 4), real.to_complex() if is_complex else real)


class InPython(nn.Module):
    """A layer whose forward branches on a sum."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().sum()) < 0:
            return x
        output: Tensor = self.layer(x)
        return output


def check(draw: random.Random, layers: list[Names]) -> None:
    """Compares steps, calls, streams and losses of layers, some of which may run in Python, at several sizes.

    All mini-batches have the same bits, so that one trace with symbols serves all sizes.
    """
    dtype, chunks = draw.choice([torch.complex64, torch.complex128]), draw.choice([1, 2, 3])
    checkpoint, input_gradient = draw.choice(["always", "never", 0.5]), draw.random() < 0.8
    sizes = draw.choice([(6, 6), (30, 30), (6, 8, 10, 12, 18)])
    writes_buffer = any(name == "track" for operators in layers for _, name in operators)  # no stream may
    in_python = draw.choice([[], [], [*range(len(layers))], [draw.randrange(len(layers))]])

    def made() -> nn.Sequential:
        found = layers_of(layers, dtype)
        for index in in_python:
            found[index] = InPython(found[index])
        return found

    plain, state = made(), draw.getstate()
    for balance in [[len(layers)], [1] * len(layers)][: len(layers)]:
        pipe = GPipe(made(), balance, chunks=chunks, checkpoint=checkpoint)
        for size in (*sizes, sizes[-1]):  # layers in Python run first, then those around become programs
            draw.setstate(state)
            x = input_of(draw, layers, dtype, size)
            gradient = gradient_of(draw, layers, x)
            expected = loop_step(plain, x, chunks, input_gradient, gradient)
            found = pipeline_step(pipe, x, None, input_gradient, gradient)
            assert unequal(found, expected) == [], (layers, in_python, size)
        with torch.no_grad(), restored(plain), restored(pipe):
            wanted = [plain_loop(plain, part, chunks) for part in (x, x, x[:6])]
            streamed = () if writes_buffer else pipe.stream([x, x[:6]])
            for output, expected_output in zip((pipe(x), *streamed), wanted, strict=False):
                assert unequal({"output": output}, {"output": expected_output}) == [], (layers, in_python)
    if not in_python:
        check_loss(made(), plain, x, gradient)


def check_loss(layers: nn.Sequential, plain: nn.Sequential, x: Tensor, target: Tensor) -> None:
    x = x.detach().requires_grad_()
    total = squares(plain(x), target)
    total.backward()
    expected, x.grad = x.grad, None
    pipe = GPipe(layers, [1] * len(layers), chunks=1)
    loss = pipe.step(x, target=target, loss_fn=squares, normalizer=1)
    assert unequal({"loss": loss, "gradient": x.grad}, {"loss": total.detach(), "gradient": expected}) == []


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().square().sum()


@pytest.mark.parametrize(("table", "name"), [(table, name) for table in TABLES for name in TABLES[table]])
@pytest.mark.sampled(8)
def test_every_operator_equals_the_plain_loop(table: str, name: str) -> None:
    check(random.Random(name), [[(table, name)]])


@pytest.mark.parametrize("seed", range(NUM_CASES))
@pytest.mark.sampled(8)
def test_random_layers_equal_the_plain_loop(seed: int) -> None:
    draw = random.Random(seed)
    check(draw, names_of_operators(draw, draw.randint(1, 3)))


def test_a_parameter_is_conjugated_between_calls() -> None:
    layers = layers_of([[("complex", "product with conj")]], torch.complex64)
    x, pipe = torch.randn(4, 4, dtype=torch.complex64), GPipe(layers, [1], chunks=2)
    pipe(x)
    layers[0].w.data = layers[0].w.data.conj()  # the same memory and strides
    assert torch.equal(pipe(x), plain_loop(layers, x, 2))
