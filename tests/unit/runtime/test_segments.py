"""Fallback segments: backwards whose gradients the forward's segment does not accept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from tests.internals import stage_locks_while_compiling
from tests.untraceable import WIDTH, FunctionLayer, branch_on_data, features, without_warnings

pytestmark = pytest.mark.usefixtures("one_thread")


def test_no_stages_layers_run_while_a_worker_compiles_a_segment() -> None:
    layers = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), FunctionLayer(branch_on_data), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
    )
    pipe = GPipe(layers, [2, 1, 1], chunks=4)
    with without_warnings(), stage_locks_while_compiling(pipe) as found:
        for _ in range(3):
            pipe(features()).sum().backward()
        pipe(features()).movedim(2, 0).contiguous().sin().sum().backward()
    assert found
    assert not any(found)


def test_unexpected_gradients_after_a_layer_changed_are_refused() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    pipe = GPipe(layers, [1, 1], chunks=2)
    output = pipe(features())
    layers[1].p = 0.25
    with pytest.raises(RuntimeError, match="was changed between forward and backward"):
        output.sum().backward()
    assert all(parameter.grad is None for parameter in layers.parameters())
    pipe(features()).sum().backward()
    assert torch.is_tensor(layers[0].weight.grad)
