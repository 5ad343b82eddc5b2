"""The warnings about sequence-first layers and about idle stages."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.arguments import warn_sequence_first
from gpipe_fast.layers.structure import BatchDims
from tests.models import features, mlp
from tests.untraceable import FunctionLayer

pytestmark = pytest.mark.usefixtures("one_thread")

D = 4


def block(batch_first: bool = False) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(D, 2, 8, batch_first=batch_first)


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


def test_every_kind_of_sequence_first_layer_is_warned_about() -> None:
    for layer in (
        nn.TransformerEncoder(block(), 1, enable_nested_tensor=False),
        nn.TransformerDecoderLayer(D, 2, 8),
        nn.MultiheadAttention(D, 2),
        nn.GRU(D, D),
        nn.Transformer(D, 2, 1, 1, 8),
    ):
        with pytest.warns(UserWarning, match=f"{type(layer).__name__} has batch_first=False"):
            warn_sequence_first([[layer]], BatchDims((None, 0)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_sequence_first([[layer]], BatchDims((1,)))


def test_batch_first_layers_and_modules_inside_user_modules_are_not_warned_about() -> None:
    """Such a module may transpose its input."""
    encoder = nn.TransformerEncoder(block(True), 1, enable_nested_tensor=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_sequence_first([[block(True), FunctionLayer(abs, block()), encoder]], BatchDims((0,)))


@pytest.mark.usefixtures("fresh_warnings")
def test_too_few_micro_batches_are_warned_about_once() -> None:
    """Once per process for the same numbers, and once per model."""

    def pipe_of(balance: list[int], chunks: int) -> GPipe:
        return GPipe(mlp(), balance, chunks=chunks, backend="eager")

    with pytest.warns(UserWarning, match=r"stages idle for .*; batch norm normalises by the samples of a"):
        GPipe(nn.Sequential(nn.BatchNorm1d(6), *mlp()), [3, 3], chunks=2, backend="eager")(features())
    message = "^3 micro-batches on 2 stages leave the stages idle for up to 25% of a step; chunks=8 or "
    message += ".* which number is fastest$"
    pipe, x = pipe_of([2, 3], 3), features()
    with pytest.warns(UserWarning, match=message) as caught:
        pipe(x)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for silent in (
            pipe,
            pipe_of([3, 2], 3),
            pipe_of([2, 3], 8),
            pipe_of([5], 1),
            pipe_of([2, 3], 4).eval(),
        ):
            silent(x)
        pipe.chunks = 4
        pipe(x)


@pytest.mark.usefixtures("fresh_warnings")
def test_the_warning_of_idle_stages_knows_the_numbers_of_micro_batches_and_samples() -> None:
    """Other numbers are warned about again."""
    for samples, chunks, balance, message in (
        (8, 3, [2, 3], "^3 micro-batches on 2 stages leave the stages idle for up to 25% "),
        (8, 1, [2, 3], "^1 micro-batch on 2 stages leaves the stages idle for up to 50% "),
        (8, 3, [2, 2, 1], "^3 micro-batches on 3 stages leave the stages idle for up to 40% "),
        (3, "auto", [2, 3], "^3 micro-batches .* a mini-batch of 3 samples has no more micro-batches; pass"),
        (1, 1, [2, 3], "^1 micro-batch .* and a mini-batch of 1 sample has no more micro-batches"),
        (5, 2, [2, 3], "chunks=5 or chunks='auto' would reduce it to 17%, but smaller micro-batches"),
    ):
        with pytest.warns(UserWarning, match=message):
            GPipe(mlp(), balance, chunks=chunks, backend="eager")(features(samples))
