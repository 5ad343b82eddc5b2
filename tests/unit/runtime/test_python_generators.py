"""Layers that draw from Python's and NumPy's generators: a recompute repeats the forward's draws."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.runtime.python_generators import PythonGenerators

SHARED = random.Random(3)
MODES = ("always", "except_last", "never")


class LayerDrop(nn.Module):
    """Skips its linear layer in half of all calls; a call that skips it draws a second number."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.draw()) if self.draw() < 0.5 else self.linear(x)


class Noise:
    """Draws from a generator in a slot."""

    __slots__ = ("generator",)

    def __init__(self) -> None:
        self.generator = random.Random(2)

    def __call__(self) -> float:
        return self.generator.random()


class CallsRandom:
    """Names the module of random functions in a special method only."""

    def __call__(self) -> float:
        return random.random()


class OwnGenerators(LayerDrop):
    """Draws from its own generators."""

    def __init__(self) -> None:
        super().__init__(self.draw_own)
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)

    def draw_own(self) -> float:
        return (self.python.random() + float(self.numpy.random())) / 2


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "random": lambda: LayerDrop(random.random),
    "uniform": lambda: LayerDrop(lambda: random.uniform(0, 1)),
    "generator expression": lambda: LayerDrop(lambda: sum(random.random() for _ in range(1))),
    "nested lambda": lambda: LayerDrop(lambda: (lambda: (lambda: random.random())())()),
    "numpy": lambda: LayerDrop(np.random.rand),
    "own": OwnGenerators,
    "global": lambda: LayerDrop(lambda: SHARED.random()),
}


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """Returns output and gradients of one step with fixed seeds."""
    random.seed(0)
    np.random.seed(0)
    SHARED.seed(0)
    model.zero_grad()
    output = model(x)
    output.pow(2).sum().backward()
    return {"output": output.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_are_equal_with_and_without_recompute(kind: str, backend: str) -> None:
    """Only one stage draws, as timing would decide in which order two stages draw."""
    x, results = torch.randn(16, 4), []
    for mode in MODES:
        torch.manual_seed(0)
        seq = nn.Sequential(nn.Linear(4, 4), LAYERS[kind](), nn.Linear(4, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = GPipe(seq, [2, 1], devices=["cpu"] * 2, chunks=8, checkpoint=mode, backend=backend)
            results.append([step(model, x) for _ in range(3)])
    for other in results[:2]:
        for ours, expected in zip(other, results[2], strict=True):
            for name, tensor in expected.items():
                found = ours[name]
                assert (tensor is None) == (found is None), name
                assert tensor is None or (found is not None and torch.equal(found, tensor)), name


def test_draws_equal_those_of_the_plain_loop() -> None:
    seq = nn.Sequential(nn.Linear(4, 4), LAYERS["random"](), nn.Linear(4, 4))
    x = torch.randn(64, 4)
    model = GPipe(seq, [2, 1], devices=["cpu"] * 2, chunks=64, checkpoint="always")
    with pytest.warns(UserWarning, match=r"layer 1 \(LayerDrop\) runs in Python"):
        model(x)
    random.seed(5)
    ours = model(x)
    random.seed(5)
    assert torch.equal(ours, torch.cat([seq(c) for c in x.chunk(64)]))


def test_stages_that_draw_concurrently_repeat_their_own_draws() -> None:
    """The order in which the stages drew does not matter."""
    torch.manual_seed(0)
    seq = nn.Sequential(*(LayerDrop(random.random) for _ in range(4)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = GPipe(seq, [1] * 4, devices=["cpu"] * 4, chunks=8, checkpoint="always")
        for _ in range(4):
            x = torch.randn(32, 4, requires_grad=True)
            output = model(x)
            output.sum().backward()
            # An output linear in input and biases is the sum of their products with their gradients.
            with torch.no_grad():
                biases = [layer.linear.bias for layer in seq]
                total = (x.grad * x).sum() + sum((b.grad * b).sum() for b in biases if b.grad is not None)
            assert torch.allclose(total, output.sum(), rtol=1e-4)
            model.zero_grad()


def test_repeated_draws_do_not_change_the_generators_states() -> None:
    layer = OwnGenerators()
    draws = PythonGenerators([layer])
    with draws.forward(recomputed=True) as drawn:
        first = layer.draw_own(), random.random(), np.random.rand()
    assert drawn.repeatable
    after = random.getstate(), layer.python.getstate(), layer.numpy.bit_generator.state
    again = draws.recompute(drawn, "layer 1", lambda: (layer.draw_own(), random.random(), np.random.rand()))
    assert again == first
    assert (random.getstate(), layer.python.getstate(), layer.numpy.bit_generator.state) == after


def test_a_recompute_that_draws_differently_is_an_error() -> None:
    draws = PythonGenerators([LayerDrop(random.random)])
    with draws.forward(recomputed=True) as drawn:
        random.random()
    with pytest.raises(RuntimeError, match="layer 1 drew different random numbers"):
        draws.recompute(drawn, "layer 1", lambda: (random.random(), random.random()))


def test_draws_of_a_layer_that_did_not_draw_before_are_not_repeatable() -> None:
    """After a call without draws, the layers may run concurrently with others."""
    layer = LayerDrop(random.random)
    draws = PythonGenerators([layer])
    found = []
    for draw in (False, True, True):
        with draws.forward(recomputed=True) as drawn:
            if draw:
                random.random()
        found.append(drawn.repeatable)
    assert found == [True, False, True]


@pytest.mark.parametrize(
    ("layer", "can_draw"),
    [
        (nn.LSTM(2, 2), False),
        (LayerDrop(lambda: 0.5), False),
        (LayerDrop(functools.partial(float, 0.5)), False),
        (LayerDrop(functools.partial(random.uniform, 0, 1)), True),
        (LayerDrop(Noise()), True),
        (LayerDrop(CallsRandom()), True),
        (LayerDrop(random.random), True),
        (LayerDrop(np.random.rand), True),
        (LayerDrop(lambda: random.gauss(0, 1)), True),
        (LayerDrop(lambda: SHARED.random()), True),
        (OwnGenerators(), True),
    ],
)
def test_draws_of_others_are_ignored_for_layers_that_cannot_draw(layer: nn.Module, can_draw: bool) -> None:
    """The draw outside of the layer stands for another thread's."""
    draws = PythonGenerators([layer])
    with draws.forward(recomputed=True) as drawn:
        random.random()
    assert (drawn.before != drawn.after) == can_draw
