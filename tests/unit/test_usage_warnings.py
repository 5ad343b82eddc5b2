"""The warning about sequence-first layers; test_gpipe.py tests the warning about idle stages."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.layers.structure import BatchDims
from gpipe_fast.usage_warnings import warn_sequence_first

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
