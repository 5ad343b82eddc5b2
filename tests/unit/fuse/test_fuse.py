"""Fusion of a stage: kernels that do not compile, nodes that decide, and kernels of large tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast.fuse import left_out, replacement_check
from gpipe_fast.fuse.fuse import Fusion, decisive_positions, fuse
from gpipe_fast.lower.launch import KernelLaunch
from gpipe_fast.lower.split import JOINT_POSITION, split
from gpipe_fast.runtime.compile import Compiler, TracedStage
from gpipe_fast.runtime.stage import BoundarySpec, Stage, TensorSpec
from gpipe_fast.trace.symbolic import Instance
from tests.unit.fuse.graphs import Function, stage_of

CPU = torch.device("cpu")


class Loader:
    """Stands in for a loader, for which the first kernels that it sees do not compile."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def failures(self, launches: Sequence[KernelLaunch]) -> list[str]:
        self.asked.append([launch.name for launch in launches])
        return ["it does not compile" if len(self.asked) == 1 else ""] * len(launches)


@pytest.fixture(autouse=True)
def nothing_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, empty in (("_reasons", {}), ("_names", set()), ("pending", [])):
        monkeypatch.setattr(left_out, name, empty)


def test_kernels_that_do_not_compile_are_left_out() -> None:
    _, *graphs = stage_of([Function(lambda x: F.layer_norm(x + x.sin(), (64,)))], torch.randn(32, 64))
    assert all(each.launches() for each in Fusion(None).fuse(*graphs)), "absent devices compile nothing"
    loader: Any = Loader()
    found = Fusion(loader).fuse(*graphs)
    first, second = loader.asked
    assert first
    assert not set(first) & set(second)
    assert sorted(set(first)) == left_out.names()
    assert all("it does not compile" in warning for warning in left_out.pending)
    assert {launch.name for each in found for launch in each.launches()} == set(second)


DECISIONS: dict[str, tuple[Callable[[Tensor], Tensor], set[str]]] = {
    "comparison": (lambda x: torch.where(x.sin() > 0, x.cos(), x.exp()), {"sin"}),
    "cast to integers": (lambda x: x.exp() * x.sin().long(), {"sin"}),
    "choice of elements": (lambda x: x.exp() + x.sin().topk(1).values, {"sin"}),
    "running choice": (lambda x: x.exp() + x.sin().cummax(1).values, {"sin"}),
    "chain": (lambda x: x.cos() * (x.sin().tanh() > 0), {"sin", "tanh"}),
    "rounding alone": (lambda x: x.sin().exp() + x.cos(), set()),
    "gradient of relu": (lambda x: F.relu(x.sin()), {"sin"}),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_what_leads_to_a_decision_is_found(name: str) -> None:
    """A rounding error in these nodes may change more than a rounding error."""
    function, expected = DECISIONS[name]
    _, forward, backward = stage_of([Function(function)], torch.randn(4, 3))
    graph = backward if name == "gradient of relu" else forward
    positions = decisive_positions(graph)
    found = {
        node.target.__name__.partition(".")[0]
        for node in graph.module.graph.nodes
        if node.op == "call_function" and node.meta.get(JOINT_POSITION) in positions
    }
    assert found & {"sin", "cos", "exp", "tanh"} == expected


def test_a_length_whose_offsets_exceed_int32_has_a_kernel_of_its_own() -> None:
    """It is checked on first use, although a template gives its graph and shorter lengths have passed."""
    layers = [nn.Linear(8, 57_344), Function(lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1])]
    compiler, stage = Compiler(), Stage(layers, 0, CPU)

    def launch_at(length: int) -> KernelLaunch:
        x = torch.empty(length, 8, requires_grad=True)
        traced = compiler.trace(stage, BoundarySpec((TensorSpec.of(x, True),)), ())
        assert isinstance(traced, TracedStage)
        assert isinstance(traced.graph, Instance) == (length > 7)
        (launch,) = fuse(split(traced.joint, 0.0).forward).launches()
        return launch

    short, _, long, too_long = (launch_at(length) for length in (5, 7, 37_450, 37_451))
    with mock.patch.object(replacement_check, "_passed", {(CPU, short.specialization)}):
        assert replacement_check.has_passed(long, CPU)
        assert not replacement_check.has_passed(too_long, CPU)
