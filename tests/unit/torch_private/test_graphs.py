"""FX graphs: modules whose code is generated lazily, and annotations of nodes."""

from __future__ import annotations

import torch
from torch import Tensor

from gpipe_fast.torch_private.graphs import (
    annotate,
    current_annotations,
    make_fx,
    preserve_node_meta,
)


def test_nodes_have_the_annotations_of_their_block() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        with annotate({"layer": 3}):
            seen.append(dict(current_annotations()))
            y = x.sin()
        return y.cos()

    with preserve_node_meta():
        graph = make_fx(function)(torch.ones(2)).graph
    sin, cos = (node for node in graph.nodes if node.op == "call_function")
    assert seen == [{"layer": 3}]
    assert sin.meta["custom"] == {"layer": 3}
    assert not cos.meta.get("custom")
