"""What fusion leaves to PyTorch, and why, in plain English; found out only when asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from gpipe_fast.fuse.regions import composites, operators
from gpipe_fast.fuse.regions.operators import DTYPES
from gpipe_fast.fuse.rewriter import moved_bytes
from gpipe_fast.lower.launch import is_launch
from gpipe_fast.lower.split import StageGraph
from gpipe_fast.lower.work import ATTENTION, is_product_or_attention, operator_name
from gpipe_fast.trace.traceability import layer_of

PRODUCT = "matrix product"
CONVOLUTION = "convolution"
FUSED_ATTENTION = "fused attention"
KERNEL_LEFT_OUT = "its kernel is left out: "
OTHER_LAYOUT = "a kernel would store its result in another memory layout"
UNKNOWN = "kernels do not compute this operator"
KEPT = "left in the forward and in the recompute alike, because a comparison depends on its bits"
SAVES_TOO_LITTLE = "no kernel of it and its neighbours moves 64 KiB or more, and saves 1/16 of their bytes"


@dataclass(frozen=True)
class Left:
    """A node that is left to PyTorch.

    Attributes:
        name: the node's name.
        operator: the operator's name, as in ``native_layer_norm``.
        layer: the index of its layer within the stage; None if unknown.
        bytes: the bytes that it reads and writes; 0 for products, convolutions and fused attention.
        reason: why it is left.
    """

    name: str
    operator: str
    layer: int | None
    bytes: int
    reason: str


def left_in(graph: StageGraph, reasons: Mapping[str, str]) -> tuple[Left, ...]:
    """Returns the nodes of a graph that read or write memory, except launches of kernels.

    Args:
        graph: a graph, after fusion or without it.
        reasons: by the name of a node, why it is left.
    """
    found = []
    for node in graph.module.graph.nodes:
        moved = moved_bytes(node)
        if not moved or is_launch(node):
            continue
        name = operator_name(node)
        kind = _kind_of_product(name)
        reason = kind or reasons.get(node.name) or _why_no_unit(node)
        found.append(Left(node.name, name, layer_of(node), 0 if kind else moved, reason))
    return tuple(found)


def _kind_of_product(name: str) -> str | None:
    if not is_product_or_attention(name):
        return None
    if name.startswith(ATTENTION):
        return FUSED_ATTENTION
    return CONVOLUTION if name.startswith("convolution") else PRODUCT


def _why_no_unit(node: fx.Node) -> str:
    """Returns why regions do not compute a node."""
    target = node.target
    if not (operators.is_element_wise(target) or composites.is_composite(target)):
        return UNKNOWN
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    tensors = [t for t in values if isinstance(t, Tensor)]
    others = sorted({str(t.dtype).removeprefix("torch.") for t in tensors if t.dtype not in DTYPES})
    if others:
        return f"kernels do not compute tensors of {', '.join(others)}"
    return SAVES_TOO_LITTLE
