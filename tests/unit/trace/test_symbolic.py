"""Templates: one symbolic trace for many shapes gives the graphs of separate traces, or is not used."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from bench.models.gpt import Block
from gpipe_fast import GPipe
from gpipe_fast.runtime.compile import Compiler, TracedStage
from gpipe_fast.runtime.equal_layers import FakeInputs, PartGraphs, trace_stage
from gpipe_fast.runtime.stage import BoundarySpec, Stage, TensorSpec
from gpipe_fast.trace.joint_graph import JointGraph
from gpipe_fast.trace.symbolic import Template, equal
from tests.internals import compiler_of, template_of
from tests.models import gpt
from tests.reference import loop_step, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 16
CPU = torch.device("cpu")


class FunctionLayer(nn.Module):
    """Applies `function` to a linear layer and the input."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear, x)


class Positions(nn.Module):
    """Adds a slice of a parameter, as long as the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


def features(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.sampled(1)
@pytest.mark.smoke
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_lengths_and_batch_sizes_of_a_gpt_share_few_templates(checkpoint: str) -> None:
    """Language models train on all tokens but the last: a view with the strides of the whole sequence."""
    layers = gpt().insert(1, Positions())
    pipe = GPipe(layers, [3, 3], chunks=4, checkpoint=checkpoint)
    for batch, length in ((8, 5), (8, 40), (8, 9), (8, 1), (8, 64), (4, 9), (12, 9)):
        x = torch.randint(0, 11, (batch, length + 1))[:, :-1]
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 4)) == [], (batch, length)
    compiler = compiler_of(pipe)
    # Per stage: traces of two lengths and of length 1, a template, and at most two more for batch sizes.
    assert compiler.num_traces <= 2 * 6
    assert compiler.num_instantiated >= 2 * 3


def test_whole_slices_do_not_prevent_templates() -> None:
    def sliced(f: nn.Module, x: Tensor) -> Tensor:
        y = x[:, :, :] * x[..., 0:, :]
        return F.pad(f(y)[:], (0, 0, 0, 1))[:, 1:, :].contiguous().tanh()

    layers = nn.Sequential(FunctionLayer(sliced), FunctionLayer(sliced))
    pipe = GPipe(layers, [1, 1], chunks=2)
    for length in (5, 9, 7, 12, 30):
        x = features(4, length)
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == [], length
    # The stages are equal, and share a template, which all lengths but the first two use.
    assert compiler_of(pipe).num_instantiated >= 3


def test_images_of_many_sizes_equal_the_plain_loop() -> None:
    layers = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last), nn.AdaptiveAvgPool2d(1)),
    )
    pipe = GPipe(layers, [3, 3], chunks=2)
    for height, width in [(8, 8), (10, 8), (12, 8), (9, 11)]:
        x = torch.randn(4, 1, height, width)
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == [], (height, width)


def test_permuted_and_expanded_boundary_gradients_share_a_template() -> None:
    layers = nn.Sequential(
        FunctionLayer(lambda f, x: f(x)),
        FunctionLayer(lambda f, x: f(x).transpose(1, 2).contiguous().transpose(1, 2)),
    )
    layers.append(FunctionLayer(lambda f, x: f(x).mean(1, keepdim=True).expand_as(x)))
    pipe = GPipe(layers, [1, 1, 1], chunks=2)
    for length in (4, 5, 6, 9):
        x = features(6, length)
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == [], length
    assert compiler_of(pipe).num_instantiated > 0


def branch_on_length(f: nn.Module, x: Tensor) -> Tensor:
    """Traces to another graph from length 8 on."""
    y: Tensor = f(x)
    return y.tanh() if x.shape[1] < 8 else y.sigmoid()


def branch_on_parity(f: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = f(x)
    return y.tanh() if x.shape[1] % 2 else y.sigmoid()


def scaled_by_length(f: nn.Module, x: Tensor) -> Tensor:
    """Multiplies by a float that Python rounds twice."""
    y: Tensor = f(x) * (1.0 / x.shape[1] ** 0.5)
    return y


def unrolled_over_length(f: nn.Module, x: Tensor) -> Tensor:
    """Traces to as many operators as there are positions."""
    state = torch.zeros_like(x[:, 0])
    for position in range(x.shape[1]):
        state = torch.tanh(f(x[:, position]) + state)
    return state


@pytest.mark.sampled(1)
@pytest.mark.smoke
@pytest.mark.parametrize(
    "function", [branch_on_length, branch_on_parity, scaled_by_length, unrolled_over_length]
)
def test_graphs_that_depend_on_the_length_equal_the_plain_loop(
    function: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    layers = nn.Sequential(FunctionLayer(function), nn.Linear(WIDTH, 2))
    pipe = GPipe(layers, [1, 1], chunks=2)
    for length in (3, 4, 5, 6, 7, 8, 9, 10, 11, 3, 9):
        x = features(4, length)
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == [], length


def test_too_many_shapes_without_a_template_run_in_python_after_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpipe_fast.runtime.planner.MAX_TRACES", 4)
    layers = nn.Sequential(FunctionLayer(unrolled_over_length), nn.Linear(WIDTH, 2))
    pipe = GPipe(layers, [1, 1], chunks=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (*range(2, 10), 3):
            x = features(2, length)
            assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 1)) == [], length
    messages = [str(w.message) for w in caught if "not traced for" in str(w.message)]
    assert len(messages) == 1
    assert "the module runs in Python for inputs that it was not traced for: it was traced 4" in messages[0]
    assert 4 <= compiler_of(pipe).num_traces <= 4 + 6


def test_backend_aten_traces_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on traces does not apply, because no layer may run in Python instead."""
    monkeypatch.setattr("gpipe_fast.runtime.planner.MAX_TRACES", 2)
    layers = nn.Sequential(FunctionLayer(unrolled_over_length))
    pipe = GPipe(layers, [1], backend="aten")
    with torch.no_grad():
        for length in range(2, 7):
            x = features(1, length)
            assert torch.equal(pipe(x), layers(x)), length
    # One trace per length, and attempts to make a template.
    assert compiler_of(pipe).num_traces >= len(range(2, 7))
    assert compiler_of(pipe).num_instantiated == 0


def trace_joint(layers: nn.Sequential, x: Tensor) -> JointGraph:
    boundary = BoundarySpec((TensorSpec.of(x, x.is_floating_point()),))
    stage = Stage(list(layers), 0, CPU)
    joint = trace_stage(stage, FakeInputs.of(boundary, False), (), PartGraphs(8))
    assert isinstance(joint, JointGraph)
    return joint


def template_after(layers: nn.Sequential, *lengths: int) -> Template:
    """Returns the template that a compiler makes after it traced these lengths."""
    compiler, stage = Compiler(), Stage(list(layers), 0, CPU)
    for length in lengths:
        x = features(4, length).requires_grad_()
        assert isinstance(compiler.trace(stage, BoundarySpec((TensorSpec.of(x, True),)), ()), TracedStage)
    template = template_of(compiler)
    assert template is not None
    return template


def test_a_template_gives_the_graph_of_a_separate_trace() -> None:
    layers = nn.Sequential(Block(WIDTH, 2), Block(WIDTH, 2))
    template = template_after(layers, 5, 7, 9)
    for length in (2, 33):
        x = features(4, length)
        instance = template.at([tuple(x.shape)], [x.stride()], ())
        assert instance is not None
        assert equal(instance.joint, trace_joint(layers, x))
        assert not equal(instance.joint, trace_joint(layers, features(4, length + 1)))


def test_sizes_that_were_equal_by_coincidence_may_differ_later() -> None:
    class Product(nn.Module):
        def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
            a, b = x
            return a.transpose(1, 2) @ a + (b.transpose(1, 2) @ b) * 0.5

    layers = nn.Sequential(Product())
    pipe = GPipe(layers, [1], chunks=2)
    for first, second in [(3, 3), (4, 4), (5, 5), (6, 7), (8, 9), (7, 3)]:
        a, b = features(4, first).requires_grad_(), features(4, second).requires_grad_()
        ours = pipe((a, b))
        expected = torch.cat([layers((c, d)) for c, d in zip(a.chunk(2), b.chunk(2), strict=True)])
        assert torch.equal(ours, expected)
        for gradient, expected_gradient in zip(
            torch.autograd.grad(ours.square().sum(), (a, b)),
            torch.autograd.grad(expected.square().sum(), (a, b)),
            strict=True,
        ):
            assert torch.equal(gradient, expected_gradient)


def test_equal_detects_every_kind_of_difference() -> None:
    layers = nn.Sequential(Block(WIDTH, 2))
    expected = trace_joint(layers, features(4, 5))

    def changed(change: Callable[[JointGraph, list[fx.Node]], object]) -> bool:
        joint = trace_joint(layers, features(4, 5))
        assert equal(joint, expected)
        change(joint, [n for n in joint.module.graph.nodes if n.op == "call_function"])
        return not equal(joint, expected)

    aten = torch.ops.aten

    def other_target(joint: JointGraph, nodes: list[fx.Node]) -> None:
        next(n for n in nodes if n.target is aten.add.Tensor).target = aten.sub.Tensor

    def other_number(joint: JointGraph, nodes: list[fx.Node]) -> None:
        node = next(n for n in nodes if n.target is aten.view.default)
        node.args = (node.args[0], [*node.args[1][:-1], -1])  # type: ignore[index, misc]

    def other_shape(joint: JointGraph, nodes: list[fx.Node]) -> None:
        nodes[-1].meta["val"] = torch.empty(1)

    def other_argument(joint: JointGraph, nodes: list[fx.Node]) -> None:
        node = next(n for n in nodes if n.target is aten.mm.default)
        node.args = node.args[::-1]

    for change in (other_target, other_number, other_shape, other_argument):
        assert changed(change), change.__name__
    assert not equal(replace(expected, outputs=expected.outputs[::-1]), expected)
