"""Which nodes of a graph become one region, and which are kept apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast.fuse.fuse import fuse
from gpipe_fast.fuse.regions.loops import MAX_ROW
from gpipe_fast.lower.split import JOINT_POSITION
from tests.unit.fuse.graphs import Function, calls, operators_in, regions_in, stage_of

pytestmark = pytest.mark.usefixtures("one_thread")

SQUARE = (64, 64)
aten = torch.ops.aten


def grouped(
    function: Callable[..., Any], *shapes: Sequence[int], **options: Any
) -> list[tuple[list[str], list[str]]]:
    """Returns for each region its operators, and the nodes that it stores."""
    found = regions_in(function, *shapes, device="cpu", **options)
    return [([*r.operators], [access.node.name for access in r.outputs]) for r in found]


def test_a_product_keeps_what_is_before_it_and_after_it_apart() -> None:
    found = grouped(lambda x, w: (x.exp().sin() @ w).cos().tanh(), SQUARE, SQUARE)
    assert found == [(["exp", "sin"], ["sin"]), (["cos", "tanh"], ["tanh"])]


def test_regions_of_few_bytes_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor) -> Tensor:
        return x.exp().sin()

    assert len(grouped(function, SQUARE)) == 1, "tests fuse small shapes"
    monkeypatch.delenv("GPIPE_FAST_MIN_REGION_BYTES")
    assert grouped(function, SQUARE) == [], "32 KiB are moved"
    assert len(grouped(function, (128, 64))) == 1


def test_a_region_does_not_need_its_own_results() -> None:
    """The product reads exp, and so does what follows it: in one kernel, both would have to be first."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        h = x.exp().sin()
        return h.cos() * (h @ w).tanh()

    found = grouped(function, SQUARE, SQUARE)
    assert found == [(["exp", "sin"], ["sin"]), (["cos", "tanh", "mul"], ["mul"])]


def test_a_recompute_that_leads_to_its_gradient_has_a_kernel_of_its_own() -> None:
    """The gradient of all but the last layers arrives only after the recompute has gone through them."""

    def backward(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        first = F.gelu(x)
        h = first @ w
        second = F.gelu(h)
        g_2 = aten.gelu_backward(g, h)
        g_1 = aten.gelu_backward(g_2 @ w.t(), x)
        return second.t() @ g, first.t() @ g_2, g_1

    found = [operators for operators, _ in grouped(backward, *[SQUARE] * 3)]
    assert found == [["gelu", "gelu_backward"]], "of the last block alone"


def test_kept_nodes_are_not_fused() -> None:
    whole = ["exp", "sin", "cos", "tanh", "sigmoid"]
    found = grouped(lambda x: x.exp().sin().cos().tanh().sigmoid(), SQUARE, kept=["cos"])
    assert found == [(whole[:2], ["sin"]), (whole[3:], ["sigmoid"])]
    _, forward, _ = stage_of([Function(lambda x: x.exp().sin().cos().tanh())], torch.randn(64, 64))
    (sine,) = calls(forward.module.graph, torch.ops.aten.sin.default)
    fused = fuse(forward, kept={sine.meta[JOINT_POSITION]})
    assert [r.name for r in fused.replaced] == ["cos, tanh"], "exp alone is no region"
    assert operators_in(fused.graph.module.graph) == ["exp", "sin"]
    assert sine.meta[JOINT_POSITION] in fused.other_positions()


def test_a_kernel_that_is_left_out_leaves_its_nodes() -> None:
    layers = [Function(lambda x: x.exp().sin()), nn.Linear(64, 64), Function(lambda x: x.cos().tanh())]
    _, forward, _ = stage_of(layers, torch.randn(64, 64))
    every = fuse(forward)
    assert len(every.replaced) == 2
    wrong = every.launches()[0]
    found = fuse(
        forward, lambda each: "NaN" if each.specialization == wrong.specialization else None, explain=True
    )
    assert [r.kernels for r in found.replaced] == [every.replaced[1].kernels]
    assert operators_in(found.graph.module.graph) == ["exp", "sin", "addmm"]
    reason = "its kernel is left out: NaN"
    assert [(left.operator, left.reason) for left in found.left[:2]] == [("exp", reason), ("sin", reason)]
    assert fuse(forward, lambda launch: "NaN").replaced == ()


def test_unchecked_kernels_are_compared_with_their_own_nodes() -> None:
    _, forward, _ = stage_of([nn.Linear(64, 64), nn.GELU(), nn.Tanh()], torch.randn(64, 64))
    graph = fuse(forward, unchecked=lambda launch: True).graph.module.graph
    (launched,) = (n for n in calls(graph) if len(n.args) == 5)
    _, _, check, checked, _ = launched.args
    assert check is not None
    assert isinstance(checked, (list, tuple))
    (read,) = checked
    assert getattr(read, "target", None) is not None
    assert operators_in(graph) == ["addmm"], "the product is not computed again for the check"


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (lambda x: x.exp().sum(0).sin(), [(256, 64)], [(["exp", "sum"], ["sum_1"])]),
        (lambda x: x.exp() + x.t(), [SQUARE], []),
        (lambda x, y: x.exp().view(24) + y.exp().view(24), [(4, 6), (6, 4)], []),
        (
            lambda x: (x.exp().sum(0), x.sin().sum((0, 1))),
            [(256, 64)],
            [(["exp", "sum", "sin"], ["sum_1", "sin"])],
        ),
    ],
    ids=["sum over rows used again", "transpose", "views of other sizes", "other sum"],
)
def test_conflicting_loops_are_several_kernels(function: Any, shapes: Any, expected: Any) -> None:
    assert grouped(function, *shapes) == expected


def test_long_rows_are_kept_apart() -> None:
    def function(x: Tensor) -> Tensor:
        return x.exp() / x.exp().sum(-1, keepdim=True)

    assert len(grouped(function, (2, MAX_ROW))) == 1
    assert grouped(function, (2, 2 * MAX_ROW)) == [(["exp", "div"], ["div"])], "the sum is read"


NORMS: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "layer norm": lambda x, shape: F.layer_norm(x, shape),
    "softmax": lambda x, shape: torch.softmax(x.flatten(-len(shape)), -1),
    "dropout": lambda x, shape: F.layer_norm(aten.native_dropout_backward(x, x > 0, 2.0), shape),
}


@pytest.mark.parametrize("normalized", [(32,), (16, 32), (4, 16, 32)])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_over_the_last_dimensions_are_one_region(norm: str, normalized: tuple[int, ...]) -> None:
    shape = (4, 16, 32)
    (region,) = regions_in(lambda x, h: NORMS[norm](x + h, normalized), shape, shape)
    columns = math.prod(normalized)
    assert (region.loops.num_cols, region.loops.num_rows) == (columns, math.prod(shape) // columns)
    assert region.loops.whole_rows
    assert (len(region.inputs), len(region.outputs)) == (2, 1)


@pytest.mark.parametrize(("dims", "fits"), [((2,), True), ((0, 2), True), ((0,), False), ((0, 1), False)])
def test_norms_over_outer_dimensions_alone_are_left(dims: tuple[int, ...], fits: bool) -> None:
    """A sum over rows of memory is complete after the last row, when the first one is needed again."""

    def norm(x: Tensor, h: Tensor) -> Tensor:
        x = x + h
        return x * torch.rsqrt((x * x).mean(dims, keepdim=True) + 1e-6)

    found = regions_in(norm, (4, 16, 32), (4, 16, 32))
    whole = ["add", "mul", "mean", "add", "rsqrt", "mul"]
    assert [whole == region.operators for region in found].count(True) == fits
