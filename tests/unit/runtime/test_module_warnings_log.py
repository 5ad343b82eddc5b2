"""Messages about traced graphs: the titles of layers, and the level at which they appear."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from gpipe_fast.runtime.module_warnings import layers_title, log_graph
from gpipe_fast.runtime.stage import Stage, TensorSpec

CPU = torch.device("cpu")


def part(first: int, size: int) -> Stage:
    return Stage([nn.Linear(2, 2) for _ in range(size)], first, CPU)


def test_titles_count_the_layers_of_the_model() -> None:
    assert layers_title(part(3, 1)) == "layer 3"
    assert layers_title(part(4, 4)) == "layers 4 to 7"


def test_graphs_are_logged_for_debugging_alone(caplog: pytest.LogCaptureFixture) -> None:
    specs = [TensorSpec.of(torch.empty(shape), False) for shape in ((8, 2), (3,))]
    with caplog.at_level(logging.INFO, "gpipe_fast"):
        log_graph(part(0, 2), "traced", specs)
    assert caplog.messages == []
    with caplog.at_level(logging.DEBUG, "gpipe_fast"):
        log_graph(part(0, 2), "traced", specs)
        log_graph(part(5, 1), "reused")
    assert caplog.messages == ["layers 0 to 1: traced, for [8, 2], [3]", "layer 5: reused"]
