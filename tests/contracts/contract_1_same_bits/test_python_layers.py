"""Layers that run in Python, alone and beside lowered ones, equal the plain loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.reference import (
    loop_step,
    pipeline_step,
    unequal,
)
from tests.untraceable import (
    UNTRACEABLE,
    WIDTH,
    FunctionLayer,
    M,
    Recurrent,
    branch_on_data,
    features,
    model,
    segments_by_stage,
    without_warnings,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("kind", ["in place", "TorchScript"])
def test_an_untraceable_layer_equals_the_plain_loop(kind: str, backend: str, checkpoint: str) -> None:
    """The others are among the random sequences of test_equality.py."""
    torch.manual_seed(3)
    layers = model(UNTRACEABLE[kind]())
    # TorchScript profiles its first runs and then optimizes, which changes the rounding.
    for _ in range(3 if kind == "TorchScript" else 1):
        expected = loop_step(layers, features(), M)
    pipe = GPipe(layers, [2, 5], chunks=M, checkpoint=checkpoint, backend=backend)
    with without_warnings():
        for _ in range(3):
            assert unequal(pipeline_step(pipe, features()), expected) == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 1, 2]])
def test_a_layer_that_returns_its_parameter_equals_the_plain_loop(
    balance: list[int], backend: str, checkpoint: str
) -> None:
    torch.manual_seed(3)
    returning = FunctionLayer(lambda linear, x: (x, linear.weight))
    multiply = FunctionLayer(lambda linear, given: linear(given[0]) @ given[1])
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), returning, multiply, nn.Tanh())
    x = torch.randn(16, WIDTH)
    pipe = GPipe(layers, balance, chunks=8, checkpoint=checkpoint, backend=backend)
    for _ in range(2):
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 8)) == []


@pytest.mark.smoke
def test_layers_and_stages_around_layers_in_python_are_lowered() -> None:
    pipe = GPipe(model(Recurrent(nn.LSTM), FunctionLayer(branch_on_data)), [2, 5, 4], chunks=M)
    with without_warnings():
        for _ in range(4):
            pipeline_step(pipe, features())
    assert segments_by_stage(pipe) == [
        [(0, 2, True)],
        [(0, 1, False), (1, 4, True), (4, 5, False)],
        [(0, 4, True)],
    ]


@pytest.mark.filterwarnings("ignore:.*runs in Python", "ignore:.*weight_norm:FutureWarning")
def test_layers_get_hooks_that_set_attributes_one_after_the_other() -> None:
    """A layer whose state is new runs in Python until it is lowered, and may change itself meanwhile."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    pipe, x = GPipe(model, balance=[2, 2], devices=["cpu"] * 2, chunks=2), torch.randn(8, WIDTH)
    for layer in (None, 2, 0, 3):
        if layer is not None:
            nn.utils.weight_norm(pipe[layer])
        for _ in range(2):
            output = pipe(x)
            with torch.no_grad():
                expected = torch.cat([model(part) for part in x.chunk(2)])
            assert torch.equal(output, expected)
            output.sum().backward()


def test_backend_eager_lowers_no_layer_and_warns_about_none() -> None:
    pipe = GPipe(model(nn.Identity()), [3, 4], chunks=8, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline_step(pipe, features())
    assert segments_by_stage(pipe) == [[(0, 3, False)], [(0, 4, False)]]


AWKWARD: dict[str, Callable[[], Tensor]] = {
    "unaligned": lambda: features(6, 3),
    "expanded": lambda: features(1, 3).expand(6, 3, WIDTH),
    "permuted": lambda: torch.randn(6, WIDTH, 3).transpose(1, 2),
    "with gaps": lambda: torch.randn(6, 7, WIDTH)[:, 1:6:2],
}


@pytest.mark.parametrize("layout", ["unaligned", "permuted", "with gaps"])
def test_a_layer_that_writes_its_input_does_not_change_the_callers_tensor(layout: str) -> None:
    layers, x = nn.Sequential(UNTRACEABLE["in place"](), nn.Linear(WIDTH, 3)), AWKWARD[layout]()
    original = x.clone()
    with torch.no_grad():
        expected = torch.cat([layers(c) for c in x.chunk(2)])
        x.copy_(original)
    with without_warnings():
        assert torch.equal(GPipe(layers, [1, 1], chunks=2)(x), expected)
        pipeline_step(GPipe(layers, [1, 1], chunks=2), x)
    assert torch.equal(x, original)
