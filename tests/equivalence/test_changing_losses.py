"""Losses that lay out their gradients otherwise than the last one did."""

from __future__ import annotations

import pytest
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.reference import leaf, pipeline, plain_loop, restored, unequal
from tests.untraceable import WIDTH, M, Of, Recurrent, features, quiet, selected

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("balance", [[2, 2], [4]])
def test_two_losses_in_turn_beside_layers_in_python(checkpoint: str, balance: list[int]) -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Recurrent(nn.LSTM), Of(selected), nn.Linear(WIDTH, WIDTH))
    pipe = GPipe(layers, balance, chunks=M, checkpoint=checkpoint)
    with quiet():
        for step in range(6):
            found = []
            for run in (lambda x: pipeline(pipe, x), lambda x: plain_loop(layers, x, M)):
                with restored(layers):
                    x = leaf(features())
                    y = run(x)
                    (y.pow(2).mean() if step % 2 else y.sum()).backward()
                    found.append({"input": x.grad} | {n: p.grad for n, p in layers.named_parameters()})
            assert unequal(*found) == [], step
