"""Exceptions of layers in Python are raised unchanged, with a note, and change nothing (contract 7)."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, is_recomputing
from tests.reference import gradient_like, pipeline_step, unequal
from tests.untraceable import WIDTH, M, features, model, without_warnings

pytestmark = pytest.mark.usefixtures("one_thread")


class RaisesInGivenCall(nn.Module):
    """Raises in the given call of its forward or of its backward, counted from 0."""

    def __init__(self, error: BaseException, forward: int = -1, backward: int = -1) -> None:
        super().__init__()
        self.linear, self.error = nn.Linear(WIDTH, WIDTH), error
        self.at = {"forward": forward, "backward": backward}
        self.calls: Counter[str] = Counter()
        self.register_buffer("count", torch.zeros(()))

    def _count_call(self, what: str) -> None:
        self.calls[what] += 1
        if self.calls[what] == self.at[what] + 1:
            raise self.error

    def forward(self, x: Tensor) -> Tensor:
        is_recomputing()  # without this query a layer with side effects is not recomputed
        self.count += 1
        self._count_call("forward")
        y: Tensor = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: self._count_call("backward"))
        return y


class UserError(Exception):
    pass


@pytest.mark.sampled(12)
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize(
    "error",
    [UserError("planted"), SystemExit(3), KeyboardInterrupt(), StopIteration("s"), GeneratorExit()],
    ids=repr,
)
@pytest.mark.parametrize("when", ["forward", "recompute", "backward"])
def test_an_exception_of_a_layer_is_raised_unchanged(when: str, error: BaseException, backend: str) -> None:
    raising_layer = RaisesInGivenCall(error)
    layers = model(raising_layer)
    pipe = GPipe(layers, [2, 2, 3], chunks=M, checkpoint="always", backend=backend)
    with without_warnings():
        expected = pipeline_step(pipe, features())
        raising_layer.calls.clear()
        raising_layer.at = {
            "forward": {"forward": 2, "recompute": M + 1, "backward": -1}[when],
            "backward": 1 if when == "backward" else -1,
        }
        state = {name: value.clone() for name, value in layers.state_dict().items()}
        if when == "forward":
            with pytest.raises(type(error)) as raised:
                pipe(features())
            assert all(torch.equal(value, state[name]) for name, value in layers.state_dict().items())
        else:
            output = pipe(features())
            with pytest.raises(type(error)) as raised:
                output.backward(gradient_like(output))
            pipe.load_state_dict(state)
        assert raised.value is error
        assert all(p.grad is None for p in layers.parameters())
        assert unequal(pipeline_step(pipe, features()), expected) == []
