"""Generated kernels where values are special: NaN, infinities, numbers, masks, shapes of one element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.kernels.numerics.comparison import needs_kernels
from tests.unit.kernels.numerics.fused_graphs import Compared, compare, run, trace, values_of

pytestmark = needs_kernels

SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 65504.0, 1e-7)
FP16 = torch.float16


def special(rows: int, cols: int) -> Tensor:
    """Returns random numbers with special ones among them, in the first row only one NaN."""
    found = torch.randn(rows, cols)
    for i, number in enumerate(SPECIAL):
        found[i % rows, (7 * i) % cols] = number
    return found


def fused(function: Callable[..., Any], *inputs: Tensor, gradients: bool = False) -> Compared:
    """Traces and fuses a function, of which no operator may be left."""
    compared = trace(function, inputs, gradients)
    assert not compared.left()
    assert compared.num_launches()
    return compared


def check_equal(compared: Compared, inputs: Sequence[Tensor]) -> None:
    """Asserts that results are NaN and infinite where PyTorch's are, and otherwise almost equal."""
    given = values_of(compared, inputs)
    found, plain = run(compared.fused.graph.module.graph, given), run(compared.plain, given)
    for own, other in zip(found, plain, strict=True):
        torch.testing.assert_close(own, other, equal_nan=True)


POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "clamp": lambda x: x.clamp(-0.5, 2.0),
    "maximum": lambda x: torch.maximum(x, -x),
    "leaky relu": lambda x: F.leaky_relu(x, 0.1),
    "tanh": torch.tanh,
    "silu": F.silu,
    # On the CPU, PyTorch's GELU of an infinity depends on its position in a vector.
    "gelu": lambda x: F.gelu(x.clamp(-10.0, 10.0)),
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "exp": torch.exp,
}


@pytest.mark.parametrize("name", POINTWISE)
def test_special_numbers_pass_element_wise_operators(name: str) -> None:
    x = special(3, 63)
    check_equal(fused(lambda x: 0.5 * POINTWISE[name](x), x), [x])


@pytest.mark.parametrize("name", ["relu", "clamp", "leaky relu", "silu", "maximum"])
def test_special_numbers_pass_gradients(name: str) -> None:
    x = special(3, 63)
    compared = trace(lambda x: 0.5 * POINTWISE[name](x), [x])
    assert compared.num_launches()
    check_equal(compared, [x])


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu by tanh", "tanh"])
def test_activations_and_their_gradients_are_accurate_for_numbers_of_every_size(name: str) -> None:
    function = {**POINTWISE, "gelu": F.gelu}[name]
    for size in (1e-6, 1e-3, 0.1, 1.0, 5.0, 1e4):
        x = torch.cat([size * torch.linspace(-1, 1, 64), torch.tensor([-0.0, 20.0, 100.0]) * size])[None]
        compare(trace(lambda x: 0.5 * function(x), [x]), [x])


REDUCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: torch.softmax(0.5 * x, -1),
    "safe softmax": lambda x: torch.ops.aten._safe_softmax(0.5 * x, -1),  # row 4 is masked completely
    "sum": lambda x: x - x.sum(-1, keepdim=True),
    "layer norm": lambda x: F.layer_norm(0.5 * x, x.shape[-1:]),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_special_numbers_pass_reductions(name: str) -> None:
    x = torch.randn(6, 63)
    x[0, 5] = x[3, 62] = math.nan
    x[1, 0] = x[3, 2] = math.inf
    x[2, 7] = -math.inf
    x[4] = -math.inf
    check_equal(fused(REDUCTIONS[name], x), [x])


# Functions of one tensor, and its shape.
SHAPES: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
    "one element": (lambda x: torch.tanh(x) * 2.0, (1, 1)),
    "sizes of one": (lambda x: x * x.sum(2, keepdim=True) + x.mean(0, keepdim=True), (1, 3, 1, 20)),
    "softmax in the middle": (lambda x: torch.softmax(0.5 * x, 1), (2, 5, 24)),
    "one row is summed": (lambda x: ((x * x).sum(0), x * 2.0), (1, 40)),
    "a sum over rows is used again": (lambda x: (x * x).sum(0) * 2.0 + x, (5, 40)),
    "a mean is used after a sum over rows": (
        lambda x: (x * x.mean(-1, keepdim=True) - x.sum(0, keepdim=True)).tanh(),
        (5, 40),
    ),
    "two views": (lambda x: torch.tanh(x.reshape(4, 30)).view(4, 5, 6) + x.view(4, 5, 6), (20, 6)),
    "views of other sizes": (lambda x: (torch.tanh(x.view(6, 4)), torch.sin(x.view(8, 3))), (24,)),
    "own transpose": (lambda x: torch.tanh(x) + x.t(), (8, 8)),
    "an expanded result": (lambda x: (torch.tanh(x) * 2.0).expand(3, 4, 25), (4, 25)),
    "8192 columns": (lambda x: torch.softmax(0.5 * x, -1), (2, 8192)),
    "too many columns": (lambda x: torch.softmax(0.5 * x, -1) * 2.0, (2, 8193)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    function, shape = SHAPES[name]
    for gradients in (False, True):
        inputs = [torch.randn(shape)]
        compare(trace(function, inputs, gradients), inputs)


@pytest.mark.parametrize("over", [(1,), (0,), (0, 1)])
@pytest.mark.parametrize("shape", [(1, 24), (5, 1), (1, 1), (24,)])
def test_repeated_tensors_are_reduced(over: tuple[int, ...], shape: tuple[int, ...]) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x).expand(5, 24).sum(over), torch.tanh(y) * 2.0

    x = torch.randn(shape)
    for inputs in ([x, torch.randn(5, 24)], [x.expand(5, 24), torch.randn(5, 24)]):
        for gradients in (False, True):
            compare(trace(function, inputs, gradients), inputs)


def test_sums_of_half_precision_are_added_in_single_precision() -> None:
    x = torch.full((3, 4097), 0.1, dtype=FP16)
    compare(fused(lambda x: (x * 2.0).sum(-1) + 1.0, x), [x])
