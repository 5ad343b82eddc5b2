"""The check of kernels: wrong results are replaced and their kernels left out, right ones pass once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

from gpipe_fast.fuse import left_out, replacement_check
from gpipe_fast.fuse.accuracy import error_ratio
from gpipe_fast.fuse.launchers import launches_in, trace_launcher
from gpipe_fast.fuse.replacement_check import ReplacementCheck, has_passed, results_of
from gpipe_fast.kernels.launch import Config, launch
from gpipe_fast.lower.launch import is_launch
from tests.unit.fuse.triton_kernels import products

CPU = torch.device("cpu")
ROWS, COLS, PROGRAMS = 4, 8, 1
BF16, FP32 = torch.bfloat16, torch.float32
CONFIG = Config({"BLOCK": 32})


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacement_check, "_passed", set())
    for name, empty in (("_reasons", {}), ("_names", set()), ("pending", [])):
        monkeypatch.setattr(left_out, name, empty)


class WithResults(fx.Interpreter):
    """Runs a fragment after its launches."""

    def __init__(self, fragment: fx.Graph, results: Sequence[Tensor]) -> None:
        super().__init__(nn.Module(), graph=fragment)
        self.results = dict(zip(results_of(fragment), results, strict=True))

    def run_node(self, n: fx.Node) -> Any:
        if is_launch(n):
            return None
        return self.results[n] if n in self.results else super().run_node(n)


class Products:
    """A replacement with one kernel: x * y in bf16, its column sums in fp32, the column sums of x, and flags.

    The first and the third result are views of what the kernel writes.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.inputs = [torch.randn(ROWS, COLS).to(BF16) for _ in range(2)]
        self.fragment = trace_launcher(self.launcher, self.inputs)
        self.check = ReplacementCheck(self.reference(), self.fragment, CPU)
        (self.launch,) = launches_in(self.fragment)

    @staticmethod
    def launcher(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        product, flags = torch.empty_like(x.view(-1)), torch.empty(ROWS, dtype=torch.bool)
        sums, sums_of_x = x.new_empty(COLS, dtype=FP32), x.new_empty(COLS)
        launch(products, (PROGRAMS,), CONFIG, x, y, product, sums, sums_of_x, flags)
        return product.view(ROWS, COLS), sums, sums_of_x.view(1, COLS), flags

    def reference(self) -> fx.Graph:
        graph = fx.Graph()
        x, y = (graph.placeholder(name) for name in "xy")
        ops = torch.ops.aten
        product = graph.call_function(ops.mul.Tensor, (x, y))
        wide = graph.call_function(ops.sum.dim_IntList, (product, [0]), {"dtype": FP32})
        sums = graph.call_function(ops.sum.dim_IntList, (x, [0], True))
        total = graph.call_function(ops.sum.dim_IntList, (x, [1]))
        flags = graph.call_function(ops.gt.Scalar, (total, 0))
        graph.output((product, wide, sums, flags))
        return graph

    def right(self) -> list[Tensor]:
        """Returns what the kernel writes."""
        x, y = (t.float() for t in self.inputs)
        product = (x * y).to(BF16)
        return [product.view(-1), product.float().sum(0), x.sum(0).to(BF16), self.inputs[0].sum(1) > 0]

    def outputs(self, results: Sequence[Tensor]) -> list[Tensor]:
        return [*WithResults(self.fragment, results).run(*self.inputs)]


def test_right_results_pass_once() -> None:
    case = Products()
    results = case.right()
    kept = [t.clone() for t in results]
    assert not has_passed(case.launch, CPU)
    assert case.check(case.inputs, results)
    assert all(map(torch.equal, results, kept))
    assert has_passed(case.launch, CPU)
    assert not has_passed(case.launch, torch.device("cuda:0"))
    assert (left_out.number_left_out(), left_out.pending) == (0, [])
    with mock.patch.object(fx.Interpreter, "run", side_effect=AssertionError):
        case.check(case.inputs, results)


def one(value: float) -> Callable[[Tensor], None]:
    def spoil(tensor: Tensor) -> None:
        tensor.view(-1)[5] = value

    return spoil


SPOIL: dict[str, tuple[int, Callable[[Tensor], object]]] = {
    "all of the product": (0, lambda t: t.copy_(t + 0.125)),
    "an element of the product": (0, one(9.0)),
    "a NaN in a sum": (1, one(float("nan"))),
    "infinity in a sum in bf16": (2, one(float("-inf"))),
    "nothing written": (1, lambda t: t.zero_()),
    "a flag": (3, lambda t: t.logical_not_()),
}


@pytest.mark.parametrize("spoil", SPOIL)
def test_wrong_results_are_replaced_and_the_kernel_is_left_out(spoil: str) -> None:
    case, (index, change) = Products(), SPOIL[spoil]
    expected = fx.GraphModule(nn.Module(), case.reference())(*case.inputs)
    for _ in range(2):  # the next micro-batch is checked as well
        results = case.right()
        change(results[index])
        assert not case.check(case.inputs, results)
        for found, wanted in zip(case.outputs(results), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-6 if wanted.dtype == FP32 else 0, atol=1e-6)
    assert "its error was" in (left_out.reason_of(case.launch) or "")
    assert not has_passed(case.launch, CPU)
    (message,) = left_out.pending
    assert message.startswith("the fused kernel triton_kernels.products is left out")
    assert "on cpu its error was" in message


def test_overflow_is_no_error() -> None:
    """A finite result is right where PyTorch's is infinite."""
    case = Products()
    case.inputs[0][0, 5] = float("inf")
    results = case.right()
    results[0][5] = 3.0
    assert case.check(case.inputs, results)
    assert not left_out.pending


def test_a_result_without_finite_elements_proves_nothing() -> None:
    case = Products()
    finite = case.inputs[0].clone()
    case.inputs[0].fill_(float("nan"))
    assert not case.check(case.inputs, case.right())
    assert not left_out.pending
    assert not has_passed(case.launch, CPU)
    case.inputs[0].copy_(finite)
    assert case.check(case.inputs, case.right())
    assert has_passed(case.launch, CPU)


def test_a_check_without_memory_changes_nothing() -> None:
    case = Products()
    results = [torch.full_like(t, 1) for t in case.right()]
    with mock.patch.object(fx.Interpreter, "run", side_effect=torch.OutOfMemoryError):
        assert case.check(case.inputs, results)
    assert all(bool((t == 1).all()) for t in results)
    assert not left_out.pending
    assert not has_passed(case.launch, CPU)


def ratio(
    found: Sequence[float], expected: Sequence[float], exact: Sequence[float], perturbed: Any = None
) -> float:
    fp32 = (torch.tensor(values, dtype=FP32) for values in (found, expected))
    fp64 = (torch.tensor(v, dtype=torch.float64) for v in (exact, exact if perturbed is None else perturbed))
    return error_ratio(*fp32, *fp64)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("found", "expected", "exact", "bounds"),
    [
        ([1.0, 2.0], [1.0, 2.0], [1.5, 2.5], (0, 0)),  # the same bits are right
        ([1.5], [1.25], [1.0], (1, 1)),  # twice PyTorch's error
        ([1.0 + 2**-22], [1.0], [1.0], (0.9, 1)),  # two roundings
        ([1.0, 2.0**-22], [1.0, 0.0], [1.0, 0.0], (0.9, 1)),  # of the largest element
        ([-0.0], [0.0], [0.0], (0, 0)),
        ([2.0**-149], [0.0], [0.0], (INF, INF)),  # zero, whatever the inputs are
        ([NAN], [1.0], [1.0], (INF, INF)),
        ([INF], [1.0], [1.0], (INF, INF)),
        ([NAN], [NAN], [NAN], (0, 0)),
        ([INF], [INF], [INF], (0, 0)),
        ([1.0, 3.0], [1.0, INF], [1.0, 1e39], (0, 0)),
        ([1.5, INF], [1.0, INF], [1.0, INF], (1e5, 1e7)),
        ([], [], [], (0, 0)),
    ],
)
def test_error_ratios(found: Any, expected: Any, exact: Any, bounds: tuple[float, float]) -> None:
    assert bounds[0] <= ratio(found, expected, exact) <= bounds[1]


def test_a_result_that_cancels_may_have_the_error_of_a_rounded_input() -> None:
    """This is the gradient of a layer norm whose output is summed: zero but for rounding."""
    assert ratio([3e-8], [0.0], [0.0]) == INF
    assert ratio([3e-8], [0.0], [0.0], [1e-8]) <= 1
    assert ratio([1e-7], [0.0], [0.0], [1e-8]) > 1
