"""Layers in Python with effects: each runs once per micro-batch, and a recompute never uses a later state."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.reference import loop_step, pipeline_step, unequal
from tests.untraceable import without_warnings

pytestmark = pytest.mark.usefixtures("one_thread")

M = 3


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return x * self.number


class BranchingThenCounting(Counting):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            x = x + 1
        return super().forward(x)


class Scaled(nn.Module):
    """Has a branch that keeps it from being traced."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.weight = 1, nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number * self.weight if x.sum() < 1e9 else x


class SettingAnother(nn.Module):
    """Sets an attribute of another layer, which is not its submodule."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others, self.number = (other,), 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        self.others[0].number = self.number * 1.5
        return x


def hooked() -> nn.Module:
    def count(module: Any, args: object, output: object) -> None:
        module.number += 1

    layer = Scaled()
    layer.register_forward_hook(count)
    return layer


KINDS: dict[str, Callable[[], list[nn.Module]]] = {
    "two counters": lambda: [Counting(), Counting()],
    "a counter behind a branch": lambda: [BranchingThenCounting()],
    "a hook that counts": lambda: [hooked()],
}


def model(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), *layers, nn.Linear(6, 6))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_effects_occur_once_per_micro_batch(kind: str, checkpoint: str, backend: str) -> None:
    plain, layers = model(*KINDS[kind]()), model(*KINDS[kind]())
    pipe = GPipe(layers, [2, len(layers) - 2], chunks=M, checkpoint=checkpoint, backend=backend)
    x = torch.randn(6, 6)
    with without_warnings():
        for _ in range(3):
            assert unequal(pipeline_step(pipe, x), loop_step(plain, x, M)) == []
            counts = [[layer.number for layer in each[1:-1]] for each in (layers, plain)]
            assert counts[0] == counts[1]


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_recompute_never_uses_what_an_earlier_layer_set_later(checkpoint: str, backend: str) -> None:
    def layers() -> nn.Sequential:
        scaled = Scaled()
        return model(SettingAnother(scaled), scaled)

    plain, own = layers(), layers()
    pipe = GPipe(own, [3, 1], chunks=M, checkpoint=checkpoint, backend=backend)
    x = torch.randn(6, 6)
    with without_warnings():
        for _ in range(3):
            expected = loop_step(plain, x, M)
            if checkpoint == "never" or backend == "eager":  # then all layers are saved together
                assert unequal(pipeline_step(pipe, x), expected) == []
                continue
            with pytest.raises(RuntimeError, match="was changed between its forward and its recompute"):
                pipeline_step(pipe, x)
            pipe.zero_grad()


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("change", [lambda layer: setattr(layer, "number", 9), lambda layer: layer.eval()])
def test_a_change_before_the_recompute_is_an_error(
    change: Callable[[nn.Module], object], backend: str
) -> None:
    scaled = Scaled()
    pipe = GPipe(model(scaled), [1, 2], chunks=M, checkpoint="always", backend=backend)
    with without_warnings():
        for _ in range(3):
            output = pipe(torch.randn(6, 6))
            change(scaled)
            with pytest.raises(RuntimeError, match=r"stage 1, layer.* change it after the backward"):
                output.sum().backward()
            scaled.number = 1
            scaled.train()
            pipe(torch.randn(6, 6)).sum().backward()


class Keeping(nn.Module):
    """Keeps a tensor with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.kept = y.square().sum()
        return y


def python_pipe(*layers: nn.Module, **options: Any) -> GPipe:
    model = nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 4))
    return GPipe(model, [1, len(model) - 1], devices=["cpu"] * 2, chunks=2, **options)


@pytest.mark.filterwarnings("ignore:.* runs in Python")
def test_a_kept_tensor_does_not_keep_the_layer() -> None:
    pipe = python_pipe(Keeping())
    pipe(torch.randn(4, 4)).sum().backward()
    weight = weakref.ref(pipe[1].linear.weight)
    del pipe
    gc.collect()
    assert weight() is None
