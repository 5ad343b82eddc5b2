"""Cross-entropy of logits and class indices, and its gradient: found by their operators, replaced by kernels.

kernels/cross_entropy.py computes the gradient from the logits: neither the log-softmax nor its gradient is
stored. A backward that finds the log-softmax of its forward saved uses it in place of the logits, because the
softmax of both is the same. Views that keep the classes, and casts where autocast or the user casts, may
stand between the operators::

    x ─▶ casts to a wider dtype, views ─▶ _log_softmax ─▶ the same ─▶ nll_loss_forward ─▶ loss
    g ─▶ nll_loss_backward ─▶ casts, views ─▶ _log_softmax_backward_data ─▶ casts, views ─▶ dx
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gpipe_fast.kernels.cross_entropy import launch_gradient, launch_losses
from gpipe_fast.kernels.mean_loss import launch_loss
from gpipe_fast.lower.operators import schema_order_arguments

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2  # reductions in ATen's numbering


@dataclass(frozen=True)
class Found:
    """A node that kernels can compute.

    Attributes:
        name: what is computed.
        inputs: the nodes that are read.
        output: the node.
        unneeded: the node that the replacement is to make superfluous, or it saves nothing; perhaps None.
        launcher: computes the output, in a tuple, from the inputs.
    """

    name: str
    inputs: list[fx.Node]
    output: fx.Node
    unneeded: fx.Node | None
    launcher: Callable[..., tuple[Tensor, ...]]


def gradients_in(graph: fx.Graph) -> Iterator[Found]:
    """Yields the gradients of logits in a graph."""
    for node in graph.find_nodes(op="call_function", target=aten._log_softmax_backward_data.default):
        g_rows, log_softmax, dim, _ = _arguments(node)
        nll, log_softmax = _behind(g_rows), _behind(log_softmax, widening=True)
        if nll.target is not aten.nll_loss_backward.default or not _is_last(log_softmax, dim):
            continue
        g, own, target, weight, reduction, ignore_index, total = _arguments(nll)
        if weight is not None or own.meta["val"].dim() != 2:
            continue
        logits = _logits(log_softmax) or log_softmax
        if reduction == MEAN and logits is log_softmax:
            inputs = [g, logits, target, total]
        elif reduction == MEAN and not _counts(total, target, ignore_index):
            continue
        else:
            inputs = [g, logits, target]
        output = _last_cast(node)
        launcher = _gradient_launcher(reduction, ignore_index, output.meta["val"])
        yield Found("gradient of cross-entropy", inputs, output, None, launcher)


def losses_in(graph: fx.Graph) -> Iterator[Found]:
    """Yields the losses in a graph."""
    for node in graph.find_nodes(op="call_function", target=aten.nll_loss_forward.default):
        own, target, weight, reduction, ignore_index = _arguments(node)
        log_softmax = _behind(own, widening=True)
        logits = _logits(log_softmax)
        loss = next((user for user in node.users if user.args[1] == 0), None)
        if weight is None and own.meta["val"].dim() == 2 and logits is not None and loss is not None:
            launcher = _loss_launcher(reduction, ignore_index, loss.meta["val"].dtype)
            yield Found("cross-entropy", [logits, target], loss, log_softmax, launcher)


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return schema_order_arguments(node.target, node)  # type: ignore[arg-type]


def _logits(log_softmax: fx.Node) -> fx.Node | None:
    """Returns what a log-softmax is computed from, behind casts and views; None for a saved one."""
    if log_softmax.target is not aten._log_softmax.default:
        return None
    x, dim, _ = _arguments(log_softmax)
    return _behind(x, widening=True) if _is_last(x, dim) else None


def _is_last(node: fx.Node, dim: int) -> bool:
    rank: int = node.meta["val"].dim()
    return dim % rank == rank - 1


def _behind(node: fx.Node, widening: bool = False) -> fx.Node:
    """Returns the node behind views of all rows, and casts; if they widen, no number changes."""
    while _is_view_of_rows(node) or _is_cast(node, widening):
        node = node.all_input_nodes[0]
    return node


def _last_cast(node: fx.Node) -> fx.Node:
    """Returns the last cast of a value's only users, or the value."""
    found = node
    while len(node.users) == 1:
        (node,) = node.users
        if _is_cast(node):
            found = node
        elif not _is_view_of_rows(node):
            break
    return found


def _is_view_of_rows(node: fx.Node) -> bool:
    """Returns whether a node is a view that keeps the last dimension, and the order of the rows."""
    if node.target not in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        return node.target in (aten.detach.default, aten.alias.default)
    return bool(node.meta["val"].shape[-1:] == node.all_input_nodes[0].meta["val"].shape[-1:])


def _is_cast(node: fx.Node, widening: bool = False) -> bool:
    if node.target is not aten._to_copy.default:
        return False
    old, new = (n.meta["val"] for n in (node.all_input_nodes[0], node))
    floats = old.is_floating_point() and new.is_floating_point() and old.device == new.device
    return floats and (not widening or torch.promote_types(old.dtype, new.dtype) == new.dtype)


def _counts(total: fx.Node, target: fx.Node, ignore_index: int) -> bool:
    """Returns whether a node is the number of targets that are not ignored, as the forward returns it."""
    if total.target is not operator.getitem or total.args[1] != 1:
        return False
    (forward,) = total.all_input_nodes
    if forward.target is not aten.nll_loss_forward.default:
        return False
    _, *others = _arguments(forward)
    return others == [target, None, MEAN, ignore_index]


def _loss_launcher(reduction: int, ignore_index: int, dtype: torch.dtype) -> Callable[..., Any]:
    def launch(x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        rows, target = x.reshape(-1, x.shape[-1]), target.contiguous()
        if reduction == NONE:
            return (launch_losses(rows, target, ignore_index, dtype=dtype),)
        losses = launch_losses(rows, target, ignore_index)
        return (launch_loss(losses, target, ignore_index, reduction == MEAN, dtype),)

    return launch


def _gradient_launcher(reduction: int, ignore_index: int, result: Tensor) -> Callable[..., Any]:
    shape, dtype = result.shape, result.dtype

    def launch(g: Tensor, x: Tensor, target: Tensor, *total: Tensor) -> tuple[Tensor, ...]:
        rows, target = x.reshape(-1, x.shape[-1]), target.contiguous()
        scale = g.float().contiguous()
        if reduction == MEAN:
            scale = scale / (total[0] if total else (target != ignore_index).sum())
        return (launch_gradient(rows, target, scale, ignore_index, dtype=dtype).view(shape),)

    return launch
