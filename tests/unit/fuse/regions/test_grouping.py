"""Which nodes of a graph become one region, and which are kept apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast.fuse.fuse import fuse
from gpipe_fast.fuse.regions.axes import Axes, Conflict
from gpipe_fast.fuse.regions.loops import MAX_ROW
from gpipe_fast.fuse.regions.order import Order
from gpipe_fast.lower.split import JOINT_POSITION
from tests.unit.fuse.graphs import Function, calls, operators_in, regions_in, stage_of

pytestmark = pytest.mark.usefixtures("one_thread")

SQUARE = (64, 64)


def grouped(
    function: Callable[..., Any], *shapes: Sequence[int], **options: Any
) -> list[tuple[list[str], list[str]]]:
    """Returns for each region its operators, and the nodes that it stores."""
    found = regions_in(function, *shapes, device="cpu", **options)
    return [([*r.operators], [access.node.name for access in r.outputs]) for r in found]


def test_a_product_keeps_what_is_before_it_and_after_it_apart() -> None:
    found = grouped(lambda x, w: (x.exp().sin() @ w).cos().tanh(), SQUARE, SQUARE)
    assert found == [(["exp", "sin"], ["sin"]), (["cos", "tanh"], ["tanh"])]


def test_a_region_does_not_need_its_own_results() -> None:
    """The product reads exp, and so does what follows it: in one kernel, both would have to be first."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        h = x.exp().sin()
        return h.cos() * (h @ w).tanh()

    found = grouped(function, SQUARE, SQUARE)
    assert found == [(["exp", "sin"], ["sin"]), (["cos", "tanh", "mul"], ["mul"])]


def test_orders_have_no_cycles() -> None:
    """0 -> 1 -> 3 and 0 -> 2 -> 3."""
    order = Order({0: [1, 2], 1: [3], 2: [3], 3: []}, [0, 1, 2, 3])
    assert not order.merge(0, 3)
    assert order.merge(0, 1)
    assert not order.merge(0, 3), "2 is still between them"
    assert order.merge(0, 2)
    assert order.merge(0, 3)
    assert {order.find(group) for group in range(4)} == {0}


def test_merged_groups_are_found_later_in_the_order() -> None:
    """Readers of the first group move behind the merged one, others before it."""
    order = Order({0: [2], 1: [3], 2: [], 3: [4], 4: []}, [0, 1, 2, 3, 4])
    assert order.merge(0, 3)
    assert not order.merge(1, 4), "the merged group reads 1, and 4 reads it"
    assert order.merge(2, 4)


@pytest.mark.parametrize("seed", range(8))
def test_random_orders_have_no_cycles(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = 12
    chosen = torch.rand(count, count, generator=generator) < 0.2
    readers = {i: [j for j in range(i + 1, count) if chosen[i, j]] for i in range(count)}
    order = Order(readers, range(count))
    merged: dict[int, int] = {i: i for i in range(count)}
    for a, b in torch.randint(count, (40, 2), generator=generator).tolist():
        a, b = order.find(a), order.find(b)
        if a == b:
            continue
        tried = {i: a if group == b else group for i, group in merged.items()}
        assert order.merge(a, b) == _is_acyclic(readers, tried)
        if order.find(b) == a:
            merged = tried
        assert all(order.find(i) == group for i, group in merged.items())


def _is_acyclic(readers: dict[int, list[int]], group: dict[int, int]) -> bool:
    edges = {(group[i], group[j]) for i in readers for j in readers[i] if group[i] != group[j]}
    left = {*group.values()}
    while left:
        free = {g for g in left if not any(b == g and a in left for a, b in edges)}
        if not free:
            return False
        left -= free
    return True


def test_what_a_region_reads_anyway_is_computed_again() -> None:
    """The backward of an RMSNorm needs the normalized x, which the recompute has in another kernel."""

    def function(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        y = x * rstd
        product = (y * 2) @ w  # not late
        return product, g * y + x * (g * y).sum(-1, keepdim=True)

    first, second = regions_in(function, (256, 64), (256, 64), (64, 64), gradients=[1], device="cpu")
    assert first.operators == ["mul", "mean", "add", "rsqrt", "mul", "mul"]
    assert [a.node.name for a in first.outputs] == ["mean", "mul_2"], "not the normalized x, mul_1"
    assert second.operators == ["add", "rsqrt", "mul", "mul", "mul", "sum", "mul", "add"]
    assert {a.node.name for a in second.inputs} == {"mean", "arg0_1", "arg1_1"}
    assert {u.node for u in first.units} & {u.node for u in second.units} == {
        u.node for u in first.units if u.node.name in ("add", "rsqrt", "mul_1")
    }


def test_a_recompute_does_not_wait_for_a_boundary_gradient() -> None:
    """An early product reads what two early nodes compute; they are not merged with late nodes."""

    def function(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x.exp().sin()
        return h @ w, (g * h).cos()

    early = (["exp", "sin"], ["sin"])
    assert grouped(function, *[SQUARE] * 3, gradients=[1]) == [early, (["mul", "cos"], ["cos"])]
    together = grouped(function, *[SQUARE] * 3)
    assert together == [(["exp", "sin", "mul", "cos"], ["sin", "cos"])], "without a gradient nothing waits"


def test_a_recompute_that_only_late_nodes_read_is_merged_with_them() -> None:
    def function(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x.exp().sin()
        return g @ h, (g * h).cos()

    (found,) = grouped(function, *[SQUARE] * 3, gradients=[1])
    assert found == (["exp", "sin", "mul", "cos"], ["sin", "cos"])


def test_kept_nodes_are_in_no_region() -> None:
    def function(x: Tensor) -> Tensor:
        return x.exp().sin().cos().tanh().sigmoid()

    whole = ["exp", "sin", "cos", "tanh", "sigmoid"]
    assert grouped(function, SQUARE) == [(whole, ["sigmoid"])]
    assert grouped(function, SQUARE, kept=["cos"]) == [(whole[:2], ["sin"]), (whole[3:], ["sigmoid"])]
    assert grouped(function, SQUARE, kept=["sin", "tanh"]) == []


def test_kept_positions_are_not_fused() -> None:
    _, forward, _ = stage_of([Function(lambda x: x.exp().sin().cos().tanh())], torch.randn(64, 64))
    (sine,) = calls(forward.module.graph, torch.ops.aten.sin.default)
    found = fuse(forward, kept={sine.meta[JOINT_POSITION]})
    assert [r.name for r in found.replaced] == ["cos, tanh"]
    assert operators_in(found.graph.module.graph) == ["exp", "sin"]
    assert sine.meta[JOINT_POSITION] in found.other_positions()


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


def test_one_operator_alone_is_no_region() -> None:
    assert grouped(lambda x, w: (x.exp() @ w).sin() @ w, SQUARE, SQUARE) == []


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (lambda x: x.exp().sum(0).sin(), [(256, 64)], [(["exp", "sum"], ["sum_1"])]),
        (lambda x: x.exp() + x.t(), [SQUARE], []),
        (lambda x, y: x.exp().view(24) + y.exp().view(24), [(4, 6), (6, 4)], []),
        (lambda x: (x.exp().amax(0), x.cosh().sum(1)), [(256, 64)], []),
        (
            lambda x: (x.exp().sum(0), x.sin().sum((0, 1))),
            [(256, 64)],
            [(["exp", "sum", "sin"], ["sum_1", "sin"])],
        ),
    ],
    ids=["sum over rows used again", "transpose", "views of other sizes", "maximum over rows", "other sum"],
)
def test_conflicting_loops_are_several_kernels(function: Any, shapes: Any, expected: Any) -> None:
    assert grouped(function, *shapes) == expected


def test_axes_conflict_where_neither_divides_the_other() -> None:
    axes = Axes()
    dims = axes.dims((4, 6))
    with pytest.raises(Conflict, match="a view divides dimensions of other sizes"):
        axes.reshape(dims, (3, 8))
    with pytest.raises(Conflict, match="a view divides dimensions of other sizes"):
        axes.reshape(axes.dims((4, 6)), (6, 4))
    with pytest.raises(Conflict, match="dimensions of different sizes are combined"):
        axes.identify([axes.new(2), axes.new(2)], [axes.new(2)])


def test_views_divide_axes() -> None:
    """[4, 512, 16 * 64] and [2048, 1024] have the axes of [4, 512, 16, 64]."""
    axes = Axes()
    dims = axes.dims((4, 512, 1024))
    heads = axes.reshape(dims, (4, 512, 16, 64))
    matrix = axes.reshape(dims, (2048, 1024))
    sizes = [[axes.size(a) for a in axes.resolve(d)] for d in (*heads, *matrix)]
    assert sizes == [[4], [512], [16], [64], [4, 512], [16, 64]]


def test_long_rows_are_kept_apart() -> None:
    def function(x: Tensor) -> Tensor:
        return x.exp() / x.exp().sum(-1, keepdim=True)

    assert len(grouped(function, (2, MAX_ROW))) == 1
    assert grouped(function, (2, 2 * MAX_ROW)) == [(["exp", "div"], ["div"])], "the sum is read"
