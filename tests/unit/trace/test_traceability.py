"""Checks of layers before a trace: modules that trace unfaithfully are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from gpipe_fast.trace.traceability import Untraceable, check_graph

aten = torch.ops.aten


def graph_of(target: object, *arguments: object) -> fx.GraphModule:
    """Returns a graph of one call, annotated with layer 3, of an input."""
    graph = fx.Graph()
    node = graph.call_function(target, (graph.placeholder("x"), *arguments))  # type: ignore[arg-type]
    for each in graph.nodes:
        each.meta["custom"] = {"layer": 3}
    graph.output(node)
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize(
    ("target", "arguments", "reason"),
    [
        (aten.rand_like.default, (), "aten.rand_like.default draws random numbers outside a layer's forward"),
        (aten.add_.Tensor, (1,), "aten.add_.Tensor changes a tensor that is neither a buffer nor created"),
        (aten._assert_async.default, (), "aten._assert_async.default returns nothing"),
    ],
)
def test_operators_that_a_program_would_compute_wrongly_are_refused(
    target: object, arguments: tuple[object, ...], reason: str
) -> None:
    with pytest.raises(Untraceable) as caught:
        check_graph(graph_of(target, *arguments))
    assert caught.value.layer == 3
    assert caught.value.reason.startswith(reason)
