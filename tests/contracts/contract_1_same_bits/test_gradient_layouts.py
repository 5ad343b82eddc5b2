"""Losses whose gradients change their memory layout from step to step, interleaved with failing calls."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.runtime.segments import SegmentSearch
from tests.contracts.contract_1_same_bits.layer_menu import MENU
from tests.internals import compiler_of
from tests.reference import SEED, Result, leaf, plain_loop, restored, unequal
from tests.untraceable import (
    WIDTH,
    FunctionLayer,
    M,
    Recurrent,
    features,
    positive_rows,
    segments_by_stage,
    without_warnings,
)

pytestmark = pytest.mark.usefixtures("one_thread")

Outputs = Sequence[Tensor]
# Losses by the memory layout of the gradients that they produce.
LOSSES: dict[str, Callable[[Outputs], Tensor]] = {
    "expanded": lambda ys: sum((y.sum() for y in ys), torch.zeros(())),
    "contiguous": lambda ys: sum((y.pow(2).mean() for y in ys), torch.zeros(())),
    "transposed": lambda ys: sum((y.transpose(1, 2).contiguous().sin().sum() for y in ys), torch.zeros(())),
    "batch last": lambda ys: sum((y.permute(2, 1, 0).contiguous().exp().mean() for y in ys), torch.zeros(())),
    "with gaps": lambda ys: sum((torch.cat([y, y.detach()], 1).sin().sum() for y in ys), torch.zeros(())),
    "one output only": lambda ys: ys[0].pow(2).sum(),
}


def reject_large_inputs(f: nn.Module, x: Tensor) -> Tensor:
    if float(x.detach().max()) > 1e4:
        raise ValueError("too large")
    y: Tensor = f(x)
    return y


def output_and_sine(f: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return f(x), x.sin()


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    **{name: MENU[name] for name in ("linear, GELU", "batch norm", "dropout", "attention", "convolution")},
    **{
        name: MENU[name]
        for name in (
            "channels_last convolution",
            "residual",
            "list of five",
            "average",
            "LSTM",
            "branch on data",
        )
    },
    "selection": lambda: [FunctionLayer(positive_rows)],
    "input check": lambda: [FunctionLayer(reject_large_inputs)],
}


def outputs_of(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def loop_outputs(layers: nn.Sequential, x: Tensor, chunks: int) -> Outputs:
    """Returns all outputs of the plain loop; `plain_loop` itself returns only one."""
    parts: list[Outputs] = []

    class First(nn.Sequential):
        def forward(self, part: Tensor) -> Tensor:
            parts.append(outputs_of(super().forward(part)))
            return parts[-1][0]

    plain_loop(First(*layers), x, chunks)
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def pipeline_outputs(pipe: GPipe, x: Tensor) -> Outputs:
    torch.manual_seed(SEED)
    return outputs_of(pipe(x))


def step(model: nn.Module, run: Callable[[Tensor], Outputs], x: Tensor, loss: str) -> Result:
    """Runs a training step and returns outputs, gradients and buffers; restores the model."""
    with restored(model):
        x = leaf(x)
        ys = run(x)
        LOSSES[loss](ys).backward()
        result: Result = {f"output {i}": y.detach() for i, y in enumerate(ys)}
        result |= {"input gradient": x.grad} | {
            f"gradient of {n}": p.grad for n, p in model.named_parameters()
        }
        return result | {f"buffer {n}": b.clone() for n, b in model.named_buffers()}


def compare_steps(layers: nn.Sequential, pipe: GPipe, x: Tensor, loss: str) -> list[str]:
    chunks = pipe.chunks
    assert isinstance(chunks, int)
    ours = step(pipe, lambda x: pipeline_outputs(pipe, x), x, loss)
    return unequal(ours, step(layers, lambda x: loop_outputs(layers, x, chunks), x, loss))


def train_random_model(seed: int, num_steps: int) -> None:
    """Trains a random model with random losses, settings and batch sizes, interleaved with invalid calls."""
    rng = random.Random(seed)
    names = [rng.choice(list(LAYERS)) for _ in range(rng.randint(2, 4))]
    torch.manual_seed(seed)
    inner_layers = [nn.Linear(WIDTH, WIDTH), *(layer for name in names for layer in LAYERS[name]())]
    layers = nn.Sequential(*inner_layers, *([FunctionLayer(output_and_sine)] if rng.random() < 0.5 else []))
    num_stages = rng.randint(1, min(3, len(layers)))
    cuts = sorted(rng.sample(range(1, len(layers)), num_stages - 1))
    balance = [b - a for a, b in zip([0, *cuts], [*cuts, len(layers)], strict=True)]
    backend = rng.choice(("auto", "auto", "auto", "eager"))
    pipe = GPipe(layers, balance, chunks=rng.randint(1, 4), backend=backend)
    for step_index in range(num_steps):
        if rng.random() < 0.3:
            pipe.checkpoint = rng.choice(CHECKPOINT_MODES)
        if rng.random() < 0.1:
            pipe.chunks = rng.randint(1, 4)
        x = features(rng.choice((4, 4, 4, 7)), 5)
        if rng.random() < 0.15:
            with pytest.raises((RuntimeError, ValueError)):
                pipe(torch.zeros(4, 5, WIDTH + 1))
        if "input check" in names and rng.random() < 0.2:
            call_that_may_fail(pipe, x)
        loss = rng.choice(list(LOSSES))
        found = compare_steps(layers, pipe, x, loss)
        assert found == [], (
            f"seed {seed}, step {step_index}, {loss}, {names}, {balance}, {pipe.chunks} chunks"
        )


def call_that_may_fail(pipe: GPipe, x: Tensor) -> None:
    """Calls the pipeline with data that a layer may reject, depending on the layers before it."""
    with restored(pipe), contextlib.suppress(ValueError):
        pipe(x * 1e6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(6))
def test_random_models_with_losses_in_random_order_equal_the_plain_loop(seed: int) -> None:
    with without_warnings():
        train_random_model(seed, 6)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 350))
def test_many_random_models_with_losses_in_random_order_equal_the_plain_loop(seed: int) -> None:
    with without_warnings():
        train_random_model(seed, 8)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("balance", [[2, 2], [4]])
def test_two_alternating_losses_beside_layers_in_python_equal_the_plain_loop(
    checkpoint: str, balance: list[int]
) -> None:
    layers = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Recurrent(nn.LSTM), FunctionLayer(positive_rows), nn.Linear(WIDTH, WIDTH)
    )
    pipe = GPipe(layers, balance, chunks=M, checkpoint=checkpoint)
    with without_warnings():
        for step_index in range(6):
            assert (
                compare_steps(layers, pipe, features(), ("expanded", "contiguous")[step_index % 2]) == []
            ), step_index


@pytest.mark.sampled(3)
@pytest.mark.parametrize("loss", list(LOSSES))
def test_a_batch_norm_in_eval_mode_equals_the_plain_loop(loss: str) -> None:
    torch.manual_seed(SEED)
    layers = nn.Sequential(*MENU["convolution"](), *MENU["batch norm"]()).eval()
    pipe = GPipe(layers, [3], chunks=1)
    for _ in range(2):
        assert compare_steps(layers, pipe, features(), loss) == []


def test_equal_gradient_layouts_share_one_trace_and_alternating_losses_stay_cached() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    pipe = GPipe(layers, [1, 2], chunks=M)
    traces = []
    for loss in ("contiguous", "expanded", "contiguous", "expanded", "transposed", "expanded"):
        assert compare_steps(layers, pipe, features(), loss) == []
        traces.append(compiler_of(pipe).num_traces)
    assert traces[0] == 2
    assert traces[1] == traces[2] == traces[3]
    assert traces[4] == traces[5]
    assert segments_by_stage(pipe) == [[(0, 1, True)], [(0, 2, True)]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("loss", list(LOSSES))
def test_after_one_step_no_fallback_segment_is_searched(loss: str) -> None:
    layers = nn.Sequential(
        *MENU["convolution"](), *MENU["batch norm"](), nn.Linear(WIDTH, WIDTH), FunctionLayer(output_and_sine)
    )
    pipe = GPipe(layers, [1, 1, 3], chunks=M)
    with mock.patch.object(
        SegmentSearch, "fallback", autospec=True, side_effect=SegmentSearch.fallback
    ) as fallback_calls:
        assert compare_steps(layers, pipe, features(), loss) == []
        fallback_calls.reset_mock()
        for _ in range(2):
            assert compare_steps(layers, pipe, features(), loss) == []
        assert fallback_calls.call_count == 0
