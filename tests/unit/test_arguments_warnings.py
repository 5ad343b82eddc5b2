"""The warnings about sequence-first layers and about idle stages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.arguments import warn_sequence_first
from gpipe_fast.layers.structure import BatchDims
from tests.models import features, mlp

pytestmark = pytest.mark.usefixtures("one_thread")

D = 4


def block(batch_first: bool = False) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(D, 2, 8, batch_first=batch_first)


class TransposesInput(nn.Module):
    """Transposes its input, which the library cannot know."""

    def __init__(self) -> None:
        super().__init__()
        self.block = block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x.transpose(0, 1)).transpose(0, 1)


def test_sequence_first_layers_are_warned_about_once() -> None:
    x = torch.randn(8, 3, D)
    pipe = GPipe(nn.Sequential(nn.Linear(D, D), nn.Sequential(nn.ReLU(), block())), [1, 1], chunks=8)
    message = (
        r"^stage 1, layer 1 \(Sequential\): TransformerEncoderLayer has batch_first=False, but micro-batches "
        "are split along dimension 0, .*; pass batch_dim=1 to GPipe, or batch_first=True to the layer$"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        pipe(x)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.TransformerEncoder(block(), 1, enable_nested_tensor=False),
        lambda: nn.TransformerDecoderLayer(D, 2, 8),
        lambda: nn.MultiheadAttention(D, 2),
        lambda: nn.GRU(D, D),
        lambda: nn.Transformer(D, 2, 1, 1, 8),
    ],
    ids=["encoder", "decoder layer", "attention", "recurrent", "transformer"],
)
def test_every_kind_of_sequence_first_layer_is_warned_about(make: Callable[[], nn.Module]) -> None:
    layer = make()
    with pytest.warns(UserWarning, match=f"{type(layer).__name__} has batch_first=False"):
        warn_sequence_first([[layer]], BatchDims((None, 0)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_sequence_first([[layer]], BatchDims((1,)))


def test_batch_first_layers_and_modules_inside_user_modules_are_not_warned_about() -> None:
    x = torch.randn(8, 3, D)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for layer in (
            block(True),
            TransposesInput(),
            nn.TransformerEncoder(block(True), 1, enable_nested_tensor=False),
        ):
            GPipe(nn.Sequential(layer, nn.Tanh()), [2], chunks=4)(x)
        GPipe(nn.Sequential(block(), nn.Tanh()), [2], chunks=3, batch_dim=1)(x)


@pytest.mark.usefixtures("fresh_warnings")
def test_too_few_micro_batches_are_warned_about_once() -> None:
    """Once per process for the same numbers, and once per model."""
    message = "^3 micro-batches on 2 stages leave the stages idle for up to 25% of a step; chunks=8 or "
    pipe, x = GPipe(mlp(), [2, 3], chunks=3), features()
    with pytest.warns(UserWarning, match=message) as caught:
        pipe(x)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for without_warnings in (
            pipe,
            GPipe(mlp(), [2, 3], chunks=3),
            GPipe(mlp(), [3, 2], chunks=3),
            GPipe(mlp(), [2, 3], chunks=8),
            GPipe(mlp(), [5], chunks=1),
            GPipe(mlp(), [2, 3], chunks=4).eval(),
        ):
            without_warnings(x)
        pipe.chunks = 4
        pipe(x)


@pytest.mark.usefixtures("fresh_warnings")
def test_other_numbers_of_micro_batches_are_warned_about_again() -> None:
    x = features()
    for chunks, balance, message in (
        (3, [2, 3], "^3 micro-batches on 2 stages leave the stages idle for up to 25% "),
        (1, [2, 3], "^1 micro-batch on 2 stages leaves the stages idle for up to 50% "),
        (3, [2, 2, 1], "^3 micro-batches on 3 stages leave the stages idle for up to 40% "),
    ):
        with pytest.warns(UserWarning, match=message):
            GPipe(mlp(), balance, chunks=chunks)(x)


@pytest.mark.usefixtures("fresh_warnings")
@pytest.mark.parametrize(
    ("samples", "chunks", "message"),
    [
        (3, "auto", "^3 micro-batches .* and a mini-batch of 3 samples has no more micro-batches; pass more"),
        (1, 1, "^1 micro-batch .* and a mini-batch of 1 sample has no more micro-batches"),
        (
            5,
            2,
            "chunks=5 or chunks='auto' would reduce it to 17%, but smaller micro-batches",
        ),
    ],
)
def test_the_warning_of_idle_stages_knows_the_number_of_samples(
    samples: int, chunks: Any, message: str
) -> None:
    with pytest.warns(UserWarning, match=message):
        GPipe(mlp(), [2, 3], chunks=chunks)(features(samples))


@pytest.mark.usefixtures("fresh_warnings")
def test_the_pytest_filter_hides_the_warning_about_few_micro_batches(pytestconfig: pytest.Config) -> None:
    """The filter in pyproject.toml matches the message for one micro-batch and for several."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for line in pytestconfig.getini("filterwarnings"):
            action, message = line.split(":", 1)
            warnings.filterwarnings(action, message)
        for chunks in (1, 2):
            GPipe(mlp(), [2, 3], chunks=chunks)(features())
