"""Layers that cannot be traced, models of such layers, and helpers that inspect their pipelines."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from gpipe_fast import GPipe, is_checkpointing, is_recomputing
from tests.internals import latest_plan

WIDTH, LENGTH, BATCH, M = 8, 5, 8, 4


class FunctionLayer(nn.Module):
    """Applies a function to a module, by default a linear layer, and the layer's arguments."""

    def __init__(self, function: Callable[..., Any], held: nn.Module | None = None) -> None:
        super().__init__()
        self.held = nn.Linear(WIDTH, WIDTH) if held is None else held
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.held, *args, **kwargs)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)[0]
        return output


class StatefulLayer(nn.Module):
    """A layer with state: an attribute, a buffer written in place, and a buffer that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.written += 1
        y: Tensor = self.linear(x) * self.replaced
        self.replaced = self.replaced * 0.5 + y.detach().mean((0, 1)).tanh().to(self.replaced.dtype)
        return y + self.written / 8


class Hooked(nn.Module):
    """A layer with user hooks that change its output and the gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.register_forward_hook(lambda module, args, output: output * 2)
        self.linear.register_full_backward_hook(
            lambda module, inputs, outputs: tuple(None if g is None else g * 0.5 for g in inputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


class Tied(nn.Module):
    """A layer that uses its parameters three times in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        y: Tensor = self.linear(torch.tanh(self.linear(x)) + self.linear(x))
        return y


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * x


class SignEmbedding(nn.Module):
    """Embeds the signs of its input; options make the table's gradients sparse, or bound its rows' norms."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(2, WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table((x > 0).long()).sum(-1) + x


def branch_on_data(f: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = f(x)
    return y.tanh() if float(y.sum()) > 0 else y.sigmoid()


def positive_rows(f: nn.Module, x: Tensor) -> Tensor:
    """Applies ``f`` to the rows with a positive first element: their number depends on the data."""
    rows = x[..., 0] > 0
    y = x.clone()
    y[rows] = f(x[rows])
    return y


def write_input_in_place(f: nn.Module, x: Tensor) -> Tensor:
    if float(x.sum()) > 1e9:
        raise AssertionError
    y: Tensor = f(x.mul_(2).relu_())
    return y


def poisson_noise(f: nn.Module, x: Tensor) -> Tensor:
    return f(x) * torch.poisson(x.detach().abs() * 3)


def reentrant_checkpoint(f: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = torch.utils.checkpoint.checkpoint(f, x, use_reentrant=True)
    return y


def asserts_phase(f: nn.Module, x: Tensor) -> Tensor:
    assert not (is_checkpointing() and is_recomputing())
    y: Tensor = f(x)
    return y


UNTRACEABLE: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.5),
    "bidirectional": lambda: nn.Sequential(
        Recurrent(nn.RNN, bidirectional=True), nn.Linear(2 * WIDTH, WIDTH)
    ),
    "branch on data": lambda: FunctionLayer(branch_on_data),
    "data-dependent shape": lambda: FunctionLayer(positive_rows),
    "in place": lambda: FunctionLayer(write_input_in_place),
    "poisson": lambda: FunctionLayer(poisson_noise),
    "reentrant checkpoint": lambda: FunctionLayer(reentrant_checkpoint),
    "asks for the phase": lambda: FunctionLayer(asserts_phase),
    "side effects": StatefulLayer,
    "own hooks": Hooked,
    "tied within": Tied,
    "TorchScript": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(Scripted())),
    "sparse gradients": lambda: SignEmbedding(sparse=True),
    "max_norm": lambda: SignEmbedding(max_norm=0.5),
}


def model(*untraceable: nn.Module) -> nn.Sequential:
    """Returns the untraceable layers surrounded by layers with random ops and running statistics."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)]
    for layer in untraceable:
        layers += [layer, nn.BatchNorm1d(LENGTH), nn.GELU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def features(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1))


@contextmanager
def without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def segments_by_stage(pipe: GPipe, microbatch: int = 0) -> list[list[tuple[int, int, bool]]]:
    """Returns the segments of every stage: first layer, end layer, and whether the segment is lowered."""
    plan = latest_plan(pipe).native
    return [plan.segments(stage, microbatch) for stage in range(len(pipe.balance))]
