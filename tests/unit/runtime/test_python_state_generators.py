"""Layers that draw from Python's and NumPy's generators: what they draw is not drawn again by a recompute."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, is_recomputing
from tests.reference import unequal

SHARED = random.Random(3)
MODES = ("always", "except_last", "never")


class LayerDrop(nn.Module):
    """Skips its linear layer in half of all calls; a call that skips it draws a second number."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.draw()) if self.draw() < 0.5 else self.linear(x)


class Asks(nn.Module):
    """Asks for its phase, and counts the recomputes."""

    recomputes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.recomputes += is_recomputing()
        y: Tensor = super().forward(x)
        return y


def asking(layer: nn.Module) -> nn.Module:
    """Returns the layer after it has become one that asks for its phase."""
    layer.__class__ = type("Asking", (Asks, type(layer)), {})
    return layer


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


class MakesGenerators(LayerDrop):
    """Replaces its generator in each second call."""

    def __init__(self) -> None:
        super().__init__(self.draw_own)
        self.num_draws, self.generator = 0, random.Random(0)

    def draw_own(self) -> float:
        self.num_draws += 1
        if self.num_draws % 2:
            self.generator = random.Random(self.num_draws)
        return self.generator.random()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "random": lambda: LayerDrop(random.random),
    "generator expression": lambda: LayerDrop(lambda: sum(random.random() for _ in range(1))),
    "nested lambda": lambda: LayerDrop(lambda: (lambda: (lambda: random.random())())()),
    "numpy": lambda: LayerDrop(np.random.rand),
    "own": OwnGenerators,
    "global": lambda: LayerDrop(lambda: SHARED.random()),
    "slot": lambda: LayerDrop(Noise()),
    "special method": lambda: LayerDrop(CallsRandom()),
    "partial": lambda: LayerDrop(functools.partial(SHARED.uniform, 0, 1)),
    "made anew": MakesGenerators,
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


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("backend", "asks"), [("auto", False), ("eager", True)])
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_are_equal_with_and_without_recompute(kind: str, backend: str, asks: bool) -> None:
    """Only one stage draws, as timing would decide in which order two stages draw."""
    x, results = torch.randn(16, 4), []
    for mode in MODES:
        torch.manual_seed(0)
        layer: Any = asking(LAYERS[kind]()) if asks else LAYERS[kind]()
        seq = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = GPipe(seq, [2, 1], devices=["cpu"] * 2, chunks=8, checkpoint=mode, backend=backend)
            results.append([step(model, x) for _ in range(3)])
        assert not asks or layer.recomputes == 0
    for other in results[:2]:
        assert [unequal(*pair) for pair in zip(other, results[2], strict=True)] == [[]] * 3


def test_stages_that_draw_concurrently_repeat_their_own_draws() -> None:
    """The order in which the stages drew does not matter."""
    torch.manual_seed(0)
    seq = nn.Sequential(
        *(LayerDrop(random.random) for _ in range(2)), *(asking(LayerDrop(random.random)) for _ in range(2))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = GPipe(seq, [1] * 4, devices=["cpu"] * 4, chunks=8, checkpoint="always")
        for _ in range(4):
            x = torch.randn(32, 4, requires_grad=True)
            output = model(x)
            output.sum().backward()
            # An output linear in input and biases is the sum of their products with their gradients.
            with torch.no_grad():
                biases = [p for name, p in seq.named_parameters() if name.endswith("bias")]
                total = (x.grad * x).sum() + sum((b.grad * b).sum() for b in biases if b.grad is not None)
            assert torch.allclose(total, output.sum(), rtol=1e-4, atol=1e-4)
            model.zero_grad()


@pytest.mark.parametrize(("backend", "limit"), [("auto", 10), ("auto", 50_000), ("eager", 50_000)])
def test_a_layer_that_asks_is_recomputed_unless_it_draws(
    backend: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a large program, too: it reaches more values than are searched."""
    monkeypatch.setattr("gpipe_fast.runtime.python_state._MAX_VALUES", limit)
    layer = asking(LayerDrop(random.random))
    model = GPipe(
        nn.Sequential(layer, nn.Linear(4, 4)), [1, 1], chunks=4, checkpoint="always", backend=backend
    )
    counts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for draw in (random.random, lambda: 0.7):
            layer.draw = draw
            model(torch.randn(8, 4)).sum().backward()
            counts.append(layer.recomputes)
    assert counts == [0, 4]
