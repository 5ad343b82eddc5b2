"""Uses of `GPipe.stream` that raise errors."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.unit.message_cases import case

X = torch.ones(4, 3)


class Noise(nn.Module):
    """Draws for inputs with this sign, after some seconds."""

    def __init__(self, sign: int, seconds: float) -> None:
        super().__init__()
        self.sign, self.seconds = sign, seconds

    def forward(self, x: Tensor) -> Tensor:
        if float(x[0, 0]) != self.sign:
            return x
        time.sleep(self.seconds)
        return F.dropout(x, 0.5)


def stream(batches: Any, *layers: nn.Module, depth: Any = 2) -> object:
    layers = layers or (nn.Linear(3, 3), nn.Linear(3, 3))
    pipe = GPipe(nn.Sequential(*layers), [1, 1], devices=["cpu"] * 2, backend="eager")
    return list(pipe.stream(batches, depth=depth))


def move_stages() -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=["cpu"] * 2)
    for _ in pipe.stream([X, X, X], depth=1):
        pipe.balance = [2]


OF_STREAMS = [
    case("got a tensor of shape [4, 3]", "pass [x]", stream, X),
    case("got 0", "a positive integer or None", stream, [X], depth=0),
    case("got 2.0", "a positive integer or None", stream, [X], depth=2.0),
    case("while a stream is open", "open another with model.stream()", move_stages),
    case("mini-batch 0 of the stream", "model(x) for each", stream, [-X, X], Noise(1, 0), Noise(-1, 0.2)),
]
