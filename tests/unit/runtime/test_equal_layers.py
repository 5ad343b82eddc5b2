"""Equal layers of a stage are traced once; the joined graphs equal those of a trace of the whole stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn

from examples.gpt.__main__ import gpt
from gpipe_fast.layers.structure import ONE_TENSOR, tuple_structure
from gpipe_fast.lower.split import StageGraph, split
from gpipe_fast.runtime import equal_layers
from gpipe_fast.runtime.equal_layers import FakeInputs, PartGraphs, parts_of, trace_stage
from gpipe_fast.runtime.stage import BoundarySpec, Stage, TensorSpec
from gpipe_fast.trace.gradient_layouts import GradientLayouts
from gpipe_fast.trace.joint_graph import JointGraph
from gpipe_fast.trace.layer_states import LayerStates
from gpipe_fast.trace.symbolic import Template
from gpipe_fast.trace.trace import trace

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


class Calls:
    """Counts the traces of parts, and traces them."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, *args: Any) -> Any:
        self.number += 1
        return trace(*args)


def described(graph: StageGraph | None) -> list[Any] | None:
    """Returns all that lowering reads of a graph, with nodes as numbers."""
    if graph is None:
        return None
    number = {node: f"%{i}" for i, node in enumerate(graph.module.graph.nodes)}

    def value(of: Any) -> Any:
        if isinstance(of, (list, tuple)):
            return tuple(map(value, of))
        if isinstance(of, Tensor):
            return tuple(of.shape), of.stride(), of.storage_offset(), of.dtype, of.device
        return of

    lines: list[Any] = []
    for node in graph.module.graph.nodes:
        arguments = _numbered((node.args, node.kwargs), number) if node.op != "placeholder" else None
        target = node.target if node.op == "call_function" else node.op
        layer = (node.meta.get("custom") or {}).get("layer")
        tag = node.meta.get("partitioner_tag")
        lines.append((target, arguments, value(node.meta.get("val")), layer, tag))
    ports = [(str(port), number[node]) for port, node in (*graph.inputs, *graph.outputs)]
    return [*lines, ports, dict(graph.parameter_uses)]


def _numbered(argument: Any, number: dict[fx.Node, str]) -> str:
    if isinstance(argument, fx.Node):
        return number[argument]
    if isinstance(argument, (list, tuple)):
        return str([_numbered(item, number) for item in argument])
    if isinstance(argument, dict):
        return str({k: _numbered(v, number) for k, v in argument.items()})
    return repr(argument)


def boundary_of(*inputs: Tensor) -> BoundarySpec:
    specs = tuple(TensorSpec.of(x, x.requires_grad) for x in inputs)
    return BoundarySpec(specs, ONE_TENSOR if len(inputs) == 1 else tuple_structure(len(inputs)))


def trace_both(
    layers: Sequence[nn.Module], *inputs: Tensor, layouts: GradientLayouts = ()
) -> tuple[JointGraph, JointGraph, int]:
    """Returns the graph joined from parts, that of a trace of all layers, and the number of traced parts."""
    stage, boundary = Stage(layers, 0, CPU), boundary_of(*inputs)
    with patch.object(equal_layers, "trace", calls := Calls()):
        joined = trace_stage(stage, FakeInputs.of(boundary, False), layouts, PartGraphs(16))
    whole = trace(layers, boundary.examples(), layouts, boundary.structure)
    assert isinstance(joined, JointGraph)
    assert isinstance(whole, JointGraph)
    return joined, whole, calls.number


class Residual(nn.Module):
    """Batch norm, whose buffers are written, and an activation in place."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        convolution = nn.Conv2d(channels, channels, 3, padding=1)
        self.branch = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True), convolution)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Pair(nn.Module):
    """Two boundary tensors, of which the second passes through or swaps places with the first."""

    def __init__(self, swap: bool) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5))
        self.swap = swap

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = pair
        x = self.branch(x * y) + x * y
        return (y, x) if self.swap else (x, y)


class Transposed(nn.Module):
    """Its outputs, and so the gradients of the layer before, are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.branch(x).transpose(0, 1).contiguous().transpose(0, 1)
        return found


class Constant(nn.Module):
    """Uses a tensor that is neither a parameter nor a buffer."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.ReLU())
        self.scale = torch.full((8,), scale)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.branch(x) * self.scale
        return found


class Numbered(nn.Module):
    """Holds its number; reads it if told so."""

    def __init__(self, number: int, reads: bool) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.ReLU())
        self.number = number
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        scale = self.number if self.reads else 1
        found: Tensor = self.branch(x) * scale
        return found


def tokens() -> Tensor:
    return torch.zeros(2, 8, dtype=torch.int64)


def rows(requires_grad: bool = True) -> Tensor:
    return torch.randn(2, 8, requires_grad=requires_grad)


CASES: dict[str, tuple[Callable[[], Sequence[nn.Module]], Callable[[], Sequence[Tensor]], int]] = {
    "gpt": (lambda: list(gpt(16, 2, 2, 8, dropout=0.1)), lambda: [tokens()], 3),
    "batch norm": (
        lambda: [nn.Conv2d(3, 4, 3), *(Residual() for _ in range(3)), nn.Flatten()],
        lambda: [torch.randn(2, 3, 8, 8)],
        3,
    ),
    "channels_last": (
        lambda: [nn.Conv2d(3, 4, 3), *(Residual() for _ in range(3))],
        lambda: [torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)],
        2,
    ),
    "swapped pair": (lambda: [Pair(True) for _ in range(4)], lambda: [rows(), rows(False)], 3),
    "passed on": (lambda: [Pair(False) for _ in range(4)], lambda: [rows(), rows(False)], 1),
    "transposed": (lambda: [Transposed() for _ in range(4)], lambda: [rows()], 2),
    "numbers that are not read": (lambda: [Numbered(i, False) for i in range(4)], lambda: [rows()], 1),
    "numbers that are read": (lambda: [Numbered(i % 2, True) for i in range(4)], lambda: [rows()], 2),
    "torch's encoder": (
        lambda: [nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(3)],
        lambda: [torch.randn(2, 4, 8)],
        2,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_joined_graphs_equal_those_of_a_whole_trace(case: str) -> None:
    make_layers, make_inputs, num_traces = CASES[case]
    joined, whole, found = trace_both(make_layers(), *make_inputs())
    assert found == num_traces
    for fraction in (0.0, 0.5, 1.0):
        ours, expected = split(joined, fraction), split(whole, fraction)
        assert described(ours.forward) == described(expected.forward)
        assert described(ours.forward_saving) == described(expected.forward_saving)
        assert described(ours.backward) == described(expected.backward)
        assert [(s.shape, s.layer) for s in ours.saved] == [(s.shape, s.layer) for s in expected.saved]


@pytest.mark.parametrize("case", ["gpt", "batch norm"])
def test_joined_graphs_of_inference_equal_those_of_a_whole_trace(case: str) -> None:
    make_layers, make_inputs, _ = CASES[case]
    with torch.no_grad():
        joined, whole, _ = trace_both([layer.eval() for layer in make_layers()], *make_inputs())
    assert described(split(joined, 0.0).forward) == described(split(whole, 0.0).forward)


def test_gradients_in_another_layout_reach_the_last_layer() -> None:
    layers = [Transposed() for _ in range(3)]
    joined, whole, found = trace_both(layers, rows(), layouts=((0, (0, 0)),))
    assert found == 3
    assert described(split(joined, 0.0).backward) == described(split(whole, 0.0).backward)


def test_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        joined, whole, found = trace_both(list(gpt(16, 2, 2, 8)), tokens())
    assert found == 3
    assert described(split(joined, 0.0).backward) == described(split(whole, 0.0).backward)


def test_each_part_keeps_its_own_constants() -> None:
    joined, whole, _ = trace_both(
        [Transposed(), Constant(1.0), Transposed(), Constant(2.0), Transposed()], rows()
    )
    ours, expected = (
        [
            getattr(joint.module, str(node.target)).mean().item()
            for joint in (graphs.forward, graphs.backward)
            if joint is not None
            for node in joint.module.graph.nodes
            if node.op == "get_attr"
        ]
        for graphs in (split(joined, 0.0), split(whole, 0.0))
    )
    assert ours == expected
    assert ours[:2] == [1.0, 2.0]


def test_a_stage_with_tied_layers_is_traced_as_a_whole() -> None:
    layers = list(gpt(16, 2, 2, 8))
    layers[2] = layers[1]
    assert len(parts_of(Stage(layers, 0, CPU))) == 1


def test_small_layers_are_traced_together() -> None:
    layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()]
    assert len(parts_of(Stage(layers, 0, CPU))) == 1


class InPlace(nn.Module):
    """Changes the output of the layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        found: Tensor = self.branch(x)
        return found + x


def test_layers_that_cannot_be_joined_are_traced_as_a_whole() -> None:
    joined, whole, _ = trace_both([InPlace(), InPlace(), InPlace()], rows(False))
    assert described(split(joined, 0.0).backward) == described(split(whole, 0.0).backward)


class Fails(nn.Module):
    """Cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.branch(x)
        return found if found.sum() > 0 else -found


def test_an_untraceable_layer_is_named_by_its_place_in_the_stage() -> None:
    layers = [*(Transposed() for _ in range(2)), Fails(), Fails()]
    inputs = FakeInputs.of(boundary_of(rows()), False)
    found = trace_stage(Stage(layers, 3, CPU), inputs, (), PartGraphs(16))
    assert not isinstance(found, JointGraph)
    assert found.layer == 2


def test_a_later_stage_uses_the_graphs_of_an_earlier_one() -> None:
    layers = list(gpt(16, 4, 2, 8))
    known, hidden = PartGraphs(16), boundary_of(torch.randn(2, 8, 16, requires_grad=True))
    states = LayerStates()
    inputs = FakeInputs.of(hidden, False)
    first = trace_stage(Stage(layers[1:3], 1, CPU, states=states), inputs, (), known)
    inputs = FakeInputs.of(hidden, False)
    with patch.object(equal_layers, "trace", calls := Calls()):
        second = trace_stage(Stage(layers[3:5], 3, CPU, states=states), inputs, (), known)
    assert calls.number == 0
    assert isinstance(first, JointGraph)
    assert isinstance(second, JointGraph)
    assert described(split(first, 0.0).backward) == described(split(second, 0.0).backward)


def test_a_changed_layer_is_traced_again() -> None:
    layers: list[nn.Module] = [Numbered(1, True) for _ in range(3)]
    known, boundary, stage = PartGraphs(16), boundary_of(rows()), Stage(layers, 0, CPU)
    trace_stage(stage, FakeInputs.of(boundary, False), (), known)
    layers[1].number = 5  # type: ignore[assignment]
    with patch.object(equal_layers, "trace", calls := Calls()):
        joined = trace_stage(stage, FakeInputs.of(boundary, False), (), known)
    assert calls.number == 1
    assert isinstance(joined, JointGraph)
    whole = trace(layers, boundary.examples())
    assert isinstance(whole, JointGraph)
    assert described(split(joined, 0.0).backward) == described(split(whole, 0.0).backward)


def test_a_symbolic_trace_joins_parts_with_the_same_symbols() -> None:
    layers = list(gpt(16, 2, 2, 32))
    stage = Stage(layers, 0, CPU)
    inputs = FakeInputs.symbolic(boundary_of(tokens()), [[False, True]])
    with patch.object(equal_layers, "trace", calls := Calls()):
        joint = trace_stage(stage, inputs, (), PartGraphs(16))
    symbols = inputs.mode.symbols()
    assert calls.number == 3
    assert isinstance(joint, JointGraph)
    assert symbols is not None
    template = Template(joint, symbols)
    for length in (5, 9, 31):
        boundary = boundary_of(torch.zeros(2, length, dtype=torch.int64))
        ours = template.instantiate(
            [s.shape for s in boundary.tensors], [s.strides for s in boundary.tensors], ()
        )
        expected = trace(layers, boundary.examples())
        assert isinstance(ours, JointGraph)
        assert isinstance(expected, JointGraph)
        assert described(split(ours, 0.0).backward) == described(split(expected, 0.0).backward)
