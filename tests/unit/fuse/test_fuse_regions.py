"""Regions of small stages: what one generated kernel computes, and what it stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models import llama
from gpipe_fast.fuse import check
from gpipe_fast.fuse.fuse import Fused, fuse
from gpipe_fast.lower.launch import KernelLaunch
from gpipe_fast.lower.split import split
from gpipe_fast.runtime.compile import Compiler, TracedStage
from gpipe_fast.runtime.stage import BoundarySpec, Stage, TensorSpec
from gpipe_fast.trace.symbolic import Instance
from tests.unit.fuse.graphs import Function, operators_in, stage_of

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, LENGTH, WIDTH = 64, 128, 32
CPU = torch.device("cpu")


class AfterLinear(nn.Module):
    """Adds a linear layer of x to x, and applies a norm, as BERT does."""

    def __init__(self, norm: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH, bias), norm

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x + self.linear(x))
        return result


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


def fused_stage(layers: Sequence[nn.Module], fraction: float) -> tuple[Fused, Fused]:
    _, forward, backward = stage_of(layers, torch.randn(BATCH, LENGTH, WIDTH), fraction)
    return fuse(forward), fuse(backward)


def kernels_of(fused: Fused) -> list[str]:
    """Returns the kernels that a graph launches, without the hash of generated ones."""
    names = (launch.name for launch in fused.launches())
    return [n.rpartition("_")[0] if n.startswith("generated.") else n for n in names]


SUMS = "partial_sums._add_partials"


def test_a_residual_and_its_layer_norm_are_one_kernel() -> None:
    forward, _ = fused_stage([AfterLinear(nn.LayerNorm(WIDTH))], 0.0)
    (replaced,) = forward.replaced
    assert replaced.name == "add, native_layer_norm"
    assert replaced.nodes == ("getitem",), "neither the sum nor the statistics are stored"
    assert kernels_of(forward) == ["generated.layer_norm"]
    assert operators_in(forward.graph.module.graph) == ["addmm"]


def test_saved_statistics_are_stored() -> None:
    forward, _ = fused_stage([AfterLinear(nn.LayerNorm(WIDTH))], 1.0)
    (replaced,) = forward.replaced
    assert replaced.nodes == ("add", "getitem", "getitem_1", "getitem_2")


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_the_gradient_of_a_layer_norm_sums_columns(fraction: float) -> None:
    """The gradients of x, of weight and bias, and of the bias of the linear layer come from one pass."""
    _, backward = fused_stage([AfterLinear(nn.LayerNorm(WIDTH))], fraction)
    (replaced,) = backward.replaced
    recomputed = "add, native_layer_norm, " if fraction == 0.0 else ""
    assert replaced.name == f"{recomputed}native_layer_norm_backward, sum"
    dx, weight, bias, *linear = replaced.nodes
    assert [dx, weight, bias] == [f"getitem_{i}" for i in (3, 4, 5)]
    assert linear == ["sum_1"]
    kernels = kernels_of(backward)
    assert kernels[0].startswith("generated.layer_norm")
    assert kernels[1:] == [SUMS], "partial sums are added in one launch"
    assert {*operators_in(backward.graph.module.graph)} <= {"addmm", "mm", "add"}


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_the_gradient_of_gelu_sums_the_bias_gradient(fraction: float) -> None:
    layers = [nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)]
    forward, backward = fused_stage(layers, fraction)
    assert forward.replaced == (), "one operator saves nothing"
    (replaced,) = backward.replaced
    assert replaced.name == ("gelu, " if fraction == 0.0 else "") + "gelu_backward, sum"
    assert replaced.nodes == (*["gelu"] * (fraction == 0.0), "gelu_backward", "sum_2")
    assert kernels_of(backward)[1:] == [SUMS]
    # The other bias is that of the last layer, of whose gradient nothing else is computed.
    assert operators_in(backward.graph.module.graph).count("sum") == 1
    assert "gelu_backward" not in operators_in(backward.graph.module.graph)


def one_by_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


SPELLINGS: dict[str, Callable[[], nn.Module]] = {
    "torch": lambda: nn.RMSNorm(WIDTH),
    "transformers": lambda: llama.RMSNorm(WIDTH),
    "a function": lambda: Function(one_by_one),
    "an operator more": lambda: Function(lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rms_norms_need_no_pattern(spelling: str) -> None:
    forward, backward = fused_stage([AfterLinear(SPELLINGS[spelling](), bias=False)], 1.0)
    (replaced,) = forward.replaced
    first, *others = replaced.name.split(", ")
    assert first == "add"
    assert "mean" in others
    assert operators_in(forward.graph.module.graph) == ["mm"]
    (gradient,) = backward.replaced
    assert {*operators_in(backward.graph.module.graph)} <= {"mm", "add"}
    has_weight = spelling in ("torch", "transformers")
    assert kernels_of(backward)[1:] == [SUMS] * has_weight
    assert len(gradient.nodes) == 1 + has_weight


def test_swiglu_is_one_kernel_in_each_direction() -> None:
    forward, backward = fused_stage([Gated()], 0.0)
    assert [(r.name, r.nodes) for r in forward.replaced] == [("silu, mul", ("mul",))]
    assert operators_in(forward.graph.module.graph) == ["mm"] * 3
    (region,) = [r for r in backward.replaced if r.name != "sum in a product"]
    assert region.name == "silu, mul, mul, mul, silu_backward"
    assert region.nodes == ("mul", "mul_1", "silu_backward"), "silu itself and its gradient are not stored"
    assert kernels_of(backward) == ["generated.silu_silu_backward"]
    assert {*operators_in(backward.graph.module.graph)} == {"mm", "addmm"}


def test_a_sum_of_gradients_that_a_region_makes_superfluous_goes_into_a_product() -> None:
    _, backward = fused_stage([Gated()], 1.0)
    assert [r.name for r in backward.replaced].count("sum in a product") == 1


def test_positions_of_all_units_count_as_fused() -> None:
    forward, _ = fused_stage([Function(lambda x: x.exp().sin().tanh())], 0.0)
    (replaced,) = forward.replaced
    assert replaced.nodes == ("tanh",)
    assert len(replaced.positions) == 3
    assert forward.fused_positions() == replaced.positions
    assert not forward.other_positions() & replaced.positions


def test_a_length_whose_offsets_exceed_int32_has_a_kernel_of_its_own() -> None:
    """It is checked on first use, although a template gives its graph and shorter lengths have passed."""
    layers = [nn.Linear(8, 57_344), Function(lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1])]
    compiler, stage = Compiler(), Stage(layers, 0, CPU)

    def launch_at(length: int) -> KernelLaunch:
        x = torch.empty(length, 8, requires_grad=True)
        traced = compiler.trace(stage, BoundarySpec((TensorSpec.of(x, True),)), ())
        assert isinstance(traced, TracedStage)
        assert isinstance(traced.graph, Instance) == (length > 7)
        (launch,) = fuse(split(traced.joint, 0.0).forward_saving).launches()
        return launch

    short, _, long, too_long = (launch_at(length) for length in (5, 7, 37_450, 37_451))
    with mock.patch.object(check, "_passed", {(CPU, short.specialization)}):
        assert check.has_passed(long, CPU)
        assert not check.has_passed(too_long, CPU)
