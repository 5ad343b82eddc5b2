"""Calls, steps, evaluations and streams in every order of PyTorch's modes, against the plain loop.

What one call has traced, or has asked to be traced later, must serve calls in other modes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.sampling import sample

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*runs in Python", "ignore:.*stages idle"),
]
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


class Branch(nn.Module):
    """Runs in Python: it branches on elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else -self.linear(x)


class Recurrent(nn.Module):
    """Runs in Python: a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.gru(x[:, None])[0][:, 0]
        return found


def normalized() -> nn.Module:
    return nn.BatchNorm1d(4)


def linear() -> nn.Module:
    return nn.Linear(4, 4)


LAYERS: tuple[Callable[[], nn.Module], ...] = (Branch, Recurrent, normalized, linear)
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
CALLS = [
    *itertools.product(("call",), MODES, (True, False)),
    *(("step", "grad", True), ("evaluate", "grad", False), ("evaluate", "inference", False)),
    *(("stream", "no_grad", False), ("stream", "inference", False)),
]


def total(output: Tensor) -> Tensor:
    return output.square().sum()


def run(model: nn.Module, pipe: GPipe | None, how: str) -> Tensor:
    """Returns the output or the loss of one call; that of the plain loop without a pipeline."""
    if pipe is None:
        outputs = torch.cat([model(microbatch) for microbatch in X.chunk(2)])
        # A step adds up the losses of micro-batches.
        losses = [total(output) for output in outputs.chunk(2)]
        return outputs if how in ("call", "stream") else losses[0] + losses[1]
    if how == "stream":
        return next(iter(pipe.stream([X])))
    if how == "call":
        return pipe(X)
    found: Tensor = getattr(pipe, how)(X, loss_fn=total, normalizer=1)
    return found


def results(model: nn.Module, pipe: GPipe | None, call: tuple[str, str, bool]) -> list[Any]:
    how, mode, training = call
    model.zero_grad()
    (model if pipe is None else pipe).train(training)
    with MODES[mode]():
        found = run(model, pipe, how)
    differentiates = how == "call" and found.requires_grad
    if differentiates or (how == "step" and pipe is None):
        (total(found) if how == "call" else found).backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [differentiates, found.detach().clone(), *gradients, *(b.clone() for b in model.buffers())]


def compare(calls: Sequence[tuple[str, str, bool]], middle: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), middle(), nn.Tanh(), nn.Linear(4, 4))
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    expected = [results(model, None, call) for call in calls]
    for buffer, value in before:
        buffer.copy_(value)
    pipe = GPipe(model, [1, 3], chunks=2)
    for number, (call, wanted) in enumerate(zip(calls, expected, strict=True)):
        found = results(model, pipe, call)
        for a, b in zip(found, wanted, strict=True):
            is_same = torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
            assert is_same, (number, call, a, b)


@pytest.mark.parametrize("layer", LAYERS)
def test_training_after_inference_of_the_same_layers(layer: Callable[[], nn.Module]) -> None:
    train, infer = ("call", "grad", True), ("call", "inference", True)
    compare([train, infer, train, ("step", "grad", True), infer, train], layer)


@pytest.mark.parametrize(
    ("calls", "layer"),
    sample(list(itertools.product(itertools.permutations(CALLS, 4), LAYERS)), 24, salt="modes"),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_orders_of_modes(calls: Sequence[tuple[str, str, bool]], layer: Callable[[], nn.Module]) -> None:
    compare([*calls, *calls[:2]], layer)


@pytest.mark.soak
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("first", CALLS, ids=str)
def test_many_orders_of_modes(first: tuple[str, str, bool], layer: Callable[[], nn.Module]) -> None:
    for calls in itertools.permutations(CALLS, 2):
        compare([first, *calls, first], layer)
