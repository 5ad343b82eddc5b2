"""What fusion leaves to PyTorch: the bytes of each node, and the reason in plain English."""

from __future__ import annotations

import torch
from torch import Tensor

from gpipe_fast.fuse.left_to_pytorch import PRODUCT, UNKNOWN, left_in
from gpipe_fast.lower.split import split
from tests.stages import trace_joint
from tests.unit.fuse.graphs import Function


def function(x: Tensor) -> Tensor:
    product = torch.mm(x.sin(), x)
    return product.cumsum(0).double().exp()


def test_nodes_that_move_bytes_are_listed_with_their_reason() -> None:
    graph = split(trace_joint([Function(function)], torch.randn(4, 4)), 0.0).forward
    nodes = {each.operator: each for each in left_in(graph, {"sin": "it is alone"})}
    assert nodes["sin"].reason == "it is alone"
    assert nodes["cumsum"].reason == UNKNOWN
    assert nodes["exp"].reason == "kernels do not compute tensors of float64"
    assert nodes["mm"].reason == PRODUCT
    assert {each.layer for each in nodes.values()} == {0}
    assert [nodes[name].bytes for name in ("sin", "exp", "mm")] == [2 * 16 * 4, 2 * 16 * 8, 0]
