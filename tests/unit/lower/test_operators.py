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
Y = torch.linspace(1, 3, 12).view(4, 3)
WRITING = [
    (aten.mm.default, (X, Y), aten.mm.out),
    (aten.addmm.default, (torch.ones(3), X, Y), aten.addmm.out),
    (aten.bmm.default, (X[None], Y[None]), aten.bmm.out),
    (aten.add.Tensor, (X, X), aten.add.out),
    (aten.mul.Tensor, (X, X), aten.mul.out),
    (aten.sum.dim_IntList, (X, [0], True), aten.sum.IntList_out),
    (aten._softmax.default, (X, 1, False), aten._softmax.out),
    (aten.tanh.default, (X,), aten.tanh.out),
    (aten.gelu.default, (X,), aten.gelu.out),
    (aten.cat.default, ([X, X], 1), aten.cat.out),
    (aten.relu.default, (X,), aten.clamp_min.out),
    (aten.threshold_backward.default, (X, X, 0), aten.threshold_backward.grad_input),
    (aten.clone.default, (X,), aten.copy_.default),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("op", "args", "expected"), WRITING, ids=lambda v: getattr(v, "__name__", ""))
def test_out_variants_write_the_bits_that_the_operator_returns(
    op: Any, args: tuple[Any, ...], expected: Any
) -> None:
    chosen = out_call(make_node(op, *args))
    assert chosen is not None
    assert chosen.op is expected
    returned = op(*args)
    out = torch.full_like(returned, float("nan"))
    execute(chosen, [out])
    assert torch.equal(out, returned)


def test_the_out_variant_of_relu_keeps_the_bits_of_special_values() -> None:
    edges = torch.tensor([float("nan"), -float("nan"), -0.0, 0.0, float("inf"), -float("inf"), 1e-45, -1e-45])
    chosen = out_call(make_node(aten.relu.default, edges))
    assert chosen is not None
    out = torch.empty_like(edges)
    execute(chosen, [out])
    assert torch.equal(out.view(torch.int32), torch.relu(edges).view(torch.int32))


def test_all_results_of_an_operator_are_written() -> None:
    chosen = out_call(make_node(aten.max_pool2d_with_indices.default, X[None, None], [2, 2]))
    assert chosen is not None
    assert chosen.out_positions is not None
    assert len(chosen.out_positions) == 2
    values, indices = aten.max_pool2d_with_indices.default(X[None, None], [2, 2])
    outs = [torch.empty_like(values), torch.empty_like(indices)]
    execute(chosen, outs)
    assert torch.equal(outs[0], values)
    assert torch.equal(outs[1], indices)


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


def test_arguments_are_in_schema_order_with_defaults() -> None:
    returned = functional_call(make_node(aten.addmm.default, "bias", "a", "b", alpha=3))
    assert returned.arguments == ("bias", "a", "b", 1, 3)
    returned = functional_call(make_node(aten.add.Tensor, "a", other="b"))
    assert returned.arguments == ("a", "b", 1)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (aten.add.out, True),
        (aten.tanh.out, True),
        (aten.clamp_min.out, True),
        (aten.copy_.default, True),
        (aten.mm.out, False),
        (aten._softmax.out, False),
        (aten.sum.IntList_out, False),
        (aten.cat.out, False),
    ],
    ids=str,
)
def test_is_pointwise_recognizes_pointwise_operators(op: Any, expected: bool) -> None:
    """A false positive would let a product overwrite its operands."""
    assert is_pointwise(op) is expected
