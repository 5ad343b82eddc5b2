"""Operator calls: arguments in schema order, and the out variant where the operator has a faithful one."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gpipe_fast.strides import contiguous
from gpipe_fast.torch_private.operators import OpOverload
from gpipe_fast.trace.tensor_metadata import AnyTensor

aten = torch.ops.aten

# Operators whose out variant, given memory with the strides that the functional variant returns, writes the
# same bits; given others, softmax's write elsewhere (pytorch#75923). A trace predicts the real strides. Many
# other out variants resize their result for an intermediate, or compute into a temporary and copy.
FAITHFUL_OUT_VARIANTS = frozenset(
    """
    mm addmm bmm baddbmm cat max_pool2d_with_indices
    add.Tensor sub.Tensor mul.Tensor div.Tensor neg reciprocal abs sign
    exp log sqrt rsqrt sin cos erf pow.Tensor_Scalar maximum minimum clamp clamp_min clamp_max where.self
    eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar
    gt.Tensor gt.Scalar ge.Tensor ge.Scalar logical_and logical_or logical_not
    threshold_backward leaky_relu leaky_relu_backward elu elu_backward softplus softplus_backward
    sigmoid sigmoid_backward tanh tanh_backward gelu gelu_backward silu silu_backward
    sum.dim_IntList mean.dim _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class OperatorCall:
    """An operator with its arguments in schema order.

    Attributes:
        op: the operator to call.
        arguments: graph nodes, lists of them, and constants.
        out_positions: None if the operator returns its results; else the positions in ``arguments`` of the
            out tensors (placeholders, None until they are filled in).
    """

    op: OpOverload[Any, Any]
    arguments: tuple[Any, ...]
    out_positions: tuple[int, ...] | None


def functional_call(node: fx.Node) -> OperatorCall:
    """Returns the call of the functional variant, as in the graph."""
    op = node.target
    assert isinstance(op, OpOverload)
    return OperatorCall(op, schema_order_arguments(op, node), None)


# Views in another dtype are copied, with their strides: by these, kernels choose how they round.
_COPIED_VIEWS = {
    aten.view_as_complex.default: aten.view_as_complex_copy.out,
    aten.view_as_real.default: aten.view_as_real_copy.out,
    aten.view.dtype: aten.view_copy.dtype_out,
}


def out_call(node: fx.Node) -> OperatorCall | None:
    """Returns a bitwise equal call of the out variant, or None if there is no faithful out variant."""
    op = node.target
    assert isinstance(op, OpOverload)
    arguments = schema_order_arguments(op, node)
    if op in (aten.clone.default, aten._to_copy.default):
        return OperatorCall(aten.copy_.default, (None, arguments[0], False), (0,))
    if op in _COPIED_VIEWS:
        return OperatorCall(_COPIED_VIEWS[op], (*arguments, None), (len(arguments),))
    if op is aten.relu.default:  # relu's kernel is clamp_min at zero
        return OperatorCall(aten.clamp_min.out, (arguments[0], 0, None), (2,))
    out = _out_variant(op)
    if out is None:
        return None
    num_outs = len(op._schema.returns)
    out_positions = tuple(range(len(arguments), len(arguments) + num_outs))
    return OperatorCall(out, (*arguments, *[None] * num_outs), out_positions)


def schema_order_arguments(op: OpOverload[Any, Any], node: fx.Node) -> tuple[Any, ...]:
    """Returns a node's arguments in the order of its operator's schema, with defaults filled in."""
    given = dict(zip((a.name for a in op._schema.arguments), node.args, strict=False)) | node.kwargs
    return tuple(given.get(a.name, a.default_value) for a in op._schema.arguments)


def named_arguments(op: OpOverload[Any, Any], node: fx.Node) -> dict[str, Any]:
    """Returns a node's arguments by name, with defaults filled in."""
    return dict(zip((a.name for a in op._schema.arguments), schema_order_arguments(op, node), strict=True))


@functools.cache
def _out_variant(op: OpOverload[Any, Any]) -> OpOverload[Any, Any] | None:
    """Returns the out overload if it is known to be faithful, else None."""
    if (
        op.namespace != "aten"
        or str(op).removeprefix("aten.").removesuffix(".default") not in FAITHFUL_OUT_VARIANTS
    ):
        return None
    inputs = [(a.name, str(a.type)) for a in op._schema.arguments]
    packet = op.overloadpacket
    for name in packet.overloads():
        out = getattr(packet, name)
        written = [a for a in out._schema.arguments if a.is_out]
        given = [(a.name, str(a.type)) for a in out._schema.arguments if not a.is_out]
        if written and given == inputs and len(written) == len(op._schema.returns):
            return out  # type: ignore[no-any-return]
    return None


def may_stand_for_change(node: fx.Node) -> bool:
    """Returns whether a result may replace a permuted tensor that the layer has changed in place."""
    op, like = node.target, node.meta["val"]
    assert isinstance(op, OpOverload)
    in_place = op.namespace == "aten" and hasattr(aten, f"{op.overloadpacket.__name__}_")
    return in_place and isinstance(like, AnyTensor) and tuple(like.stride()) != contiguous(like.shape)


def is_pointwise(op: OpOverload[Any, Any]) -> bool:
    """Returns whether each result element depends only on the input elements at the same position."""
    return torch.Tag.pointwise in op.tags or op in (aten.copy_.default, aten.clamp_min.out)
