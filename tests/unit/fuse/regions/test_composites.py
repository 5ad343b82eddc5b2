"""Composite operators as reductions and expressions, evaluated in PyTorch and compared with the operators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpipe_fast.fuse.patterns import arguments_of
from gpipe_fast.fuse.regions.composites import expand, is_composite
from gpipe_fast.fuse.regions.operators import Unsupported
from gpipe_fast.fuse.regions.values import Constant, Input, Mapped, Reduced, Value, View
from tests.unit.fuse.graphs import calls, graph_of

aten = torch.ops.aten
# What the templates call, for tensors.
LANGUAGE = SimpleNamespace(
    exp=torch.exp,
    log=torch.log,
    rsqrt=torch.rsqrt,
    div_rn=torch.div,
    where=lambda c, a, b: torch.where(c, a, b),
)
REDUCTIONS = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


def evaluate(value: Value, inputs: dict[Value, Tensor]) -> Tensor:
    """Returns a value, computed by PyTorch in the precision of the inputs."""
    if value in inputs:
        return inputs[value]
    if isinstance(value, Mapped):
        operands = [evaluate(operand, inputs) for operand in value.operands]
        names = {f"v{index}": operand for index, operand in enumerate(operands)}
        found: Any = eval(value.template.format(*names), {"tl": LANGUAGE}, names)
        return torch.as_tensor(found, dtype=torch.float64).expand(value.shape)
    if isinstance(value, Reduced):
        return REDUCTIONS[value.operation](evaluate(value.operand, inputs), value.dims, keepdim=True)
    if isinstance(value, View):
        return evaluate(value.operand, inputs).reshape(value.shape)
    assert isinstance(value, Constant)
    return torch.full(value.shape, value.number, dtype=torch.float64)


MATRIX, COLUMN, ROW = (4, 6), (4, 1), (6,)
MASKED = torch.zeros(4, 6).masked_fill(torch.arange(4)[:, None] == 2, -torch.inf)
OPERATORS: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "sum": (lambda x: aten.sum.dim_IntList(x, [-1]), (MATRIX,)),
    "sum of all": (lambda x: aten.sum.default(x), (MATRIX,)),
    "mean": (lambda x: aten.mean.dim(x, [0], True), (MATRIX,)),
    "maximum": (lambda x: aten.amax.default(x, [1]), (MATRIX,)),
    "minimum": (lambda x: aten.amin.default(x, [0], True), (MATRIX,)),
    "variance": (lambda x: aten.var.correction(x, [1], correction=2), (MATRIX,)),
    "variance and mean": (lambda x: aten.var_mean.correction(x, [1], keepdim=True), (MATRIX,)),
    "layer norm": (lambda x, w, b: aten.native_layer_norm(x, [6], w, b, 1e-5), (MATRIX, ROW, ROW)),
    "layer norm's gradient": (
        lambda g, x, m, r, w: aten.native_layer_norm_backward(g, x, [6], m, r, w, w, [True] * 3),
        (MATRIX, MATRIX, COLUMN, COLUMN, ROW),
    ),
    "softmax": (lambda x: aten._softmax(x, 1, False), (MATRIX,)),
    "safe softmax": (lambda x: aten._safe_softmax(x, 1), (MATRIX,)),
    "log softmax": (lambda x: aten._log_softmax(x, 0, False), (MATRIX,)),
    "softmax's gradient": (
        lambda g, y: aten._softmax_backward_data(g, y, 1, torch.float32), (MATRIX, MATRIX),
    ),
    "log softmax's gradient": (
        lambda g, y: aten._log_softmax_backward_data(g, y, 1, torch.float32), (MATRIX, MATRIX),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_values_are_those_of_the_operator(name: str) -> None:
    function, shapes = OPERATORS[name]
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in shapes]
    graph = graph_of(function, *shapes, device="cpu")
    (node,) = (each for each in calls(graph) if is_composite(each.target))
    values = {n: Input(tuple(n.meta["val"].shape), n.meta["val"].dtype, n) for n in node.all_input_nodes}
    inputs = dict(zip(graph.find_nodes(op="placeholder"), tensors, strict=True))
    given = {k: values.get(a, a) if not isinstance(a, list) else a for k, a in arguments_of(node).items()}
    expected = function(*tensors)
    expected = [expected] if isinstance(expected, Tensor) else list(expected)
    found = expand(node.target, given, expected)
    known = {value: inputs[n].double() for n, value in values.items()}
    for value, tensor in zip(found, expected, strict=True):
        assert value is not None
        assert (value.shape, value.dtype) == (tuple(tensor.shape), tensor.dtype)
        torch.testing.assert_close(evaluate(value, known), tensor.double(), rtol=1e-5, atol=1e-5)


def test_results_that_are_not_needed_are_not_computed() -> None:
    x = Input((4, 6), torch.float32, None)  # type: ignore[arg-type]
    statistics = Input((4, 1), torch.float32, None)  # type: ignore[arg-type]
    given = {"grad_out": x, "input": x, "normalized_shape": [6], "mean": statistics, "rstd": statistics}
    found = expand(aten.native_layer_norm_backward.default, given, [torch.empty(4, 6), None, None])
    assert [value is None for value in found] == [False, True, True]


def test_a_row_that_is_masked_completely_is_zero() -> None:
    x = Input((4, 6), torch.float32, None)  # type: ignore[arg-type]
    (value,) = expand(aten._safe_softmax.default, {"self": x, "dim": 1}, [torch.empty(4, 6)])
    assert value is not None
    found = evaluate(value, {x: MASKED.double()})
    torch.testing.assert_close(found, aten._safe_softmax(MASKED.double(), 1))


def test_sums_of_integers_and_variances_of_one_number_are_refused() -> None:
    integers = Input((4, 6), torch.int64, None)  # type: ignore[arg-type]
    for result in (torch.empty(4, dtype=torch.int64), torch.empty(4)):
        with pytest.raises(Unsupported):
            expand(aten.sum.dim_IntList, {"self": integers, "dim": [1]}, [result])
    column = Input((4, 1), torch.float32, None)  # type: ignore[arg-type]
    with pytest.raises(Unsupported):
        expand(aten.var.correction, {"self": column, "dim": [1]}, [torch.empty(4)])
