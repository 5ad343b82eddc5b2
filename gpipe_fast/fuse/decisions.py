"""The nodes on which a decision depends: a comparison, a cast to integers, or the choice of an element.

A rounding error may flip a decision: with ``relu``, the gradient of an element is kept or not; with routing,
a token goes to another expert. All other values change by a rounding error only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from gpipe_fast.lower.split import JOINT_POSITION, StageGraph

aten = torch.ops.aten
# Gradients that compare an input with a number themselves.
_COMPARE = frozenset(
    {
        aten.threshold_backward.default,
        aten.leaky_relu_backward.default,
        aten.hardtanh_backward.default,
        aten.hardswish_backward.default,
        aten.hardsigmoid_backward.default,
        aten.elu_backward.default,
    }
)
# Operators that also return indices.
_CHOOSE = frozenset(
    {
        aten.max.dim,
        aten.min.dim,
        aten.median.dim,
        aten.kthvalue.default,
        aten.topk.default,
        aten.sort.default,
        aten.sort.stable,
        aten.max_pool2d_with_indices.default,
        aten.max_pool3d_with_indices.default,
        aten.adaptive_max_pool2d.default,
        aten.adaptive_max_pool3d.default,
        aten.fractional_max_pool2d.default,
    }
)


def decisive_positions(graph: StageGraph) -> frozenset[int]:
    """Returns the positions, in the joint graph, of the nodes on which a decision depends."""
    found: set[fx.Node] = set()
    pending = [n for n in graph.module.graph.nodes if _decides(n)]
    while pending:
        for node in pending.pop().all_input_nodes:
            if node not in found:
                found.add(node)
                pending.append(node)
    return frozenset(n.meta[JOINT_POSITION] for n in found if JOINT_POSITION in n.meta)


def _decides(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target in _COMPARE or node.target in _CHOOSE:
        return True
    value = node.meta.get("val")
    read = (n.meta.get("val") for n in node.all_input_nodes)
    return isinstance(value, Tensor) and not _is_float(value) and any(map(_is_float, read))


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
