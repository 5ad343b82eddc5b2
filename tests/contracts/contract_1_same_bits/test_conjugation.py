"""Conjugated and negated tensors: bits that say how to read memory, in layers and across boundaries."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.contracts.contract_1_same_bits.conjugation import (
    COMPLEX,
    TABLES,
    TO_REAL,
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


@pytest.mark.parametrize(("table", "name"), [(table, name) for table in TABLES for name in TABLES[table]])
@pytest.mark.sampled(8)
def test_every_operator_equals_the_plain_loop(table: str, name: str) -> None:
    layers = [[(table, name)]]
    draw = random.Random(name)
    x, plain = input_of(draw, layers, torch.complex64), layers_of(layers, torch.complex64)
    gradient = gradient_of(draw, layers, x)
    expected = loop_step(plain, x, 2, gradient=gradient)
    pipe = GPipe(layers_of(layers, torch.complex64), [1], chunks=2)
    assert unequal(pipeline_step(pipe, x, gradient=gradient), expected) == []


@pytest.mark.parametrize("seed", range(NUM_CASES))
@pytest.mark.sampled(6)
def test_random_layers_equal_the_plain_loop(seed: int) -> None:
    draw = random.Random(seed)
    layers = names_of_operators(draw, draw.randint(1, 3))
    dtype, chunks = draw.choice([torch.complex64, torch.complex128]), draw.choice([1, 2, 3])
    checkpoint, input_gradient = draw.choice(["always", "never", 0.5]), draw.random() < 0.8
    x, plain = input_of(draw, layers, dtype), layers_of(layers, dtype)
    gradient = gradient_of(draw, layers, x)
    expected = loop_step(plain, x, chunks, input_gradient, gradient)
    with torch.no_grad(), restored(plain):
        expected_output = plain_loop(plain, x, chunks)
    for balance in [[len(layers)], [1] * len(layers)][: len(layers)]:
        pipe = GPipe(layers_of(layers, dtype), balance, chunks=chunks, checkpoint=checkpoint)
        for _ in range(2):  # the second step knows the layouts of the first one's gradients
            assert unequal(pipeline_step(pipe, x, None, input_gradient, gradient), expected) == [], layers
        with torch.no_grad():
            assert unequal({"output": pipe(x)}, {"output": expected_output}) == [], layers


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.sampled(1)
def test_other_sizes_a_stream_and_a_step_equal_the_plain_loop(seed: int) -> None:
    draw = random.Random(seed)
    layers = names_of_operators(draw, draw.randint(1, 3))
    plain, own = (layers_of(layers, torch.complex64) for _ in range(2))
    pipe = GPipe(own, [len(layers)], chunks=2)
    draws = draw.getstate()
    sizes = (4, 6, 8, 10, 14)
    for size in sizes:  # the same bits, so that one trace with symbols serves all
        draw.setstate(draws)
        x = input_of(draw, layers, torch.complex64, size)
        gradient = gradient_of(draw, layers, x)
        expected = loop_step(plain, x, 2, gradient=gradient)
        assert unequal(pipeline_step(pipe, x, gradient=gradient), expected) == [], (layers, size)
    with torch.no_grad(), restored(plain):
        outputs = [plain_loop(plain, x[:size], 2) for size in (14, 4, 14)]
    with restored(pipe):
        for output, expected_output in zip(pipe.stream([x, x[:4], x]), outputs, strict=True):
            assert unequal({"output": output}, {"output": expected_output}) == [], layers
    x = x.detach().requires_grad_()
    total = squares(plain(x), gradient)
    total.backward()
    expected_gradient, x.grad = x.grad, None
    whole = GPipe(own, [1] * len(layers), chunks=1)
    found = whole.step(x, target=gradient, loss_fn=squares, normalizer=1)
    losses = {"loss": found, "gradient": x.grad}
    assert unequal(losses, {"loss": total.detach(), "gradient": expected_gradient}) == []


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


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.sampled(2)
def test_layers_in_python_and_other_stages_receive_conjugated_tensors(seed: int) -> None:
    draw = random.Random(seed)
    makes, reads = (draw.choice(names) for names in (["conj", "ifft", "sqrt"], ["expand", *COMPLEX]))
    layers: list[Names] = [[("complex", makes)], [("complex", reads)], [("to real", draw.choice([*TO_REAL]))]]
    in_python = draw.choice([[], [0], [1], [2], [0, 1], [0, 2], [1, 2]])
    x = input_of(draw, layers, torch.complex64, 30)
    plain, own = (layers_of(layers, torch.complex64) for _ in range(2))
    for each in (plain, own):
        for index in in_python:
            each[index] = InPython(each[index])
    gradient = gradient_of(draw, layers, x)
    expected = loop_step(plain, x, 2, gradient=gradient)
    pipe = GPipe(own, draw.choice([[3], [1, 2], [2, 1]]), chunks=2)
    for index in range(3):  # layers in Python run first, then those around them become programs
        assert unequal(pipeline_step(pipe, x, gradient=gradient), expected) == [], (layers, in_python, index)


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().square().sum()


class Recorded(nn.Module):
    """A model that conjugates between its blocks."""

    def __init__(self, layers: list[Names]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layers_of(layers, torch.complex64))
        self.head = nn.Parameter(torch.eye(4, dtype=torch.complex64) * 2j)

    def forward(self, x: Tensor) -> Tensor:
        x = x.conj()
        for block in self.blocks:
            x = block(x).mH.mT
        return (x @ self.head.mH).conj().imag


@pytest.mark.parametrize("name", ["product with conj", "addmm", "vdot of conj", "view_as_real of conj"])
@pytest.mark.sampled(1)
def test_a_model_that_conjugates_between_blocks_equals_the_plain_loop(name: str) -> None:
    model, plain = (Recorded([[("complex", name)]] * 3) for _ in range(2))
    x = noise(random.Random(name), (6, 4), torch.complex64)
    pipe = GPipe.from_model(model, args=(x,), chunks=2, balance=[2, 1])
    output, expected = pipe(x), torch.cat([plain(part) for part in x.chunk(2)])
    gradient = noise(random.Random(1), (6, 4), torch.float32)
    for each in (output, expected):
        each.backward(gradient)
    found, wanted = ({n: p.grad for n, p in each.named_parameters()} for each in (model, plain))
    assert unequal({"output": output, **found}, {"output": expected, **wanted}) == []


def test_a_parameter_is_conjugated_between_calls() -> None:
    layers = layers_of([[("complex", "product with conj")]], torch.complex64)
    x, pipe = torch.randn(4, 4, dtype=torch.complex64), GPipe(layers, [1], chunks=2)
    pipe(x)
    layers[0].w.data = layers[0].w.data.conj()  # the same memory and strides
    assert torch.equal(pipe(x), plain_loop(layers, x, 2))
