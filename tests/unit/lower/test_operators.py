"""Out variants of operators: which operators have one, and that it gives the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from gpipe_fast.lower.operators import OperatorCall, functional_call, is_pointwise, out_call

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten


def make_node(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Returns a graph node whose arguments are tensors instead of nodes."""
    return fx.Graph().call_function(op, args, kwargs)


def execute(chosen: OperatorCall, outs: list[Tensor]) -> None:
    arguments = list(chosen.arguments)
    assert chosen.out_positions is not None
    for position, out in zip(chosen.out_positions, outs, strict=True):
        assert arguments[position] is None
        arguments[position] = out
    schema = chosen.op._schema.arguments
    chosen.op(
        *(a for a, s in zip(arguments, schema, strict=True) if not s.kwarg_only),
        **{s.name: a for a, s in zip(arguments, schema, strict=True) if s.kwarg_only},
    )


X = torch.linspace(-2, 2, 12).view(3, 4)


def test_the_out_variant_of_relu_keeps_the_bits_of_special_values() -> None:
    edges = torch.tensor([float("nan"), -float("nan"), -0.0, 0.0, float("inf"), -float("inf"), 1e-45, -1e-45])
    chosen = out_call(make_node(aten.relu.default, edges))
    assert chosen is not None
    out = torch.empty_like(edges)
    execute(chosen, [out])
    assert torch.equal(out.view(torch.int32), torch.relu(edges).view(torch.int32))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        # Their generated out variants compute into a temporary and copy it.
        (aten.native_layer_norm.default, (X, [4], None, None, 1e-5)),
        (aten.embedding.default, (X, torch.tensor([0]))),
        (aten.convolution.default, (X[None], X[:, :, None], None, [1], [0], [1], False, [0], 1)),
        (aten.view_as_complex.default, (X.view(6, 2),)),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_operators_without_a_real_out_variant_return_their_results(op: Any, args: tuple[Any, ...]) -> None:
    node = make_node(op, *args)
    assert out_call(node) is None
    returned = functional_call(node)
    assert returned.op is op
    assert returned.out_positions is None


def test_is_pointwise_recognizes_pointwise_operators() -> None:
    """A false positive would let a product overwrite its operands."""
    assert all(map(is_pointwise, (aten.add.out, aten.tanh.out, aten.clamp_min.out, aten.copy_.default)))
    others = aten.mm.out, aten._softmax.out, aten.sum.IntList_out, aten.cat.out
    assert not any(map(is_pointwise, others))
