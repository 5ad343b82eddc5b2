"""Templates: one symbolic trace for many shapes gives the graphs of separate traces, or is not used."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import gpipe_fast
from gpipe_fast import GPipe
from gpipe_fast.runtime.compile import Compiler, TracedStage
from gpipe_fast.runtime.equal_layers import FakeInputs, PartGraphs, trace_stage
from gpipe_fast.runtime.stage import BoundarySpec, Stage, TensorSpec
from gpipe_fast.trace.joint_graph import GraphRole, JointGraph
from gpipe_fast.trace.symbolic import Template, equal
from gpipe_fast.trace.symbols import Symbols
from tests.internals import compiler_of, template_of
from tests.reference import loop_step, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, HEADS, VOCABULARY = 16, 2, 11
CPU = torch.device("cpu")


class FunctionLayer(nn.Module):
    """Applies `function` to a linear layer and the input."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear, x)


class TokenAndPosition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.tokens(x) + self.positions[: x.shape[1]]
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).reshape(batch, length, -1)
        result: Tensor = x + self.drop(F.gelu(self.down(y)))
        return result


def gpt() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        TokenAndPosition(), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
    )


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


def features(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(sum(shape)))


def conv() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(0, (-1, 1)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


@pytest.mark.sampled(1)
@pytest.mark.smoke
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_lengths_and_batch_sizes_of_a_gpt_share_few_templates(checkpoint: str) -> None:
    layers = gpt()
    pipe = GPipe(layers, [2, 3], chunks=4, checkpoint=checkpoint)
    draw = random.Random(0)
    shapes = [(8, draw.randint(2, 64)) for _ in range(7)] + [(draw.randint(1, 4) * 4, 9) for _ in range(4)]
    for batch, length in shapes:
        x = tokens(batch, length)
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 4)) == [], (batch, length)
    compiler = compiler_of(pipe)
    # Per stage: traces of two lengths, a template, and at most two more templates for other batch sizes.
    assert compiler.num_traces <= 2 * 5
    assert compiler.num_instantiated >= 2 * 5


def test_token_views_of_longer_sequences_share_a_template() -> None:
    """Language models train on all tokens but the last: a view with the strides of the whole sequence."""
    layers = gpt()
    pipe = GPipe(layers, [2, 3], chunks=2)
    for length in (5, 9, 7, 22):
        x = tokens(4, length + 1)[:, :-1]
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == [], length
    assert compiler_of(pipe).num_traces <= 2 * 3


class Slices(nn.Module):
    """Slices whole and other dimensions; gets a number of the whole mini-batch."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, number = inputs
        y = x[:, :, :] * x[..., 0:, :] / number
        return F.pad(y[:], (0, 0, 0, 1))[:, 1:, :].contiguous().tanh(), number


class First(nn.Module):
    """Returns the first of its inputs."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return inputs[0]


def test_whole_slices_and_numbers_as_inputs_do_not_prevent_templates() -> None:
    layers = nn.Sequential(Slices(), Slices(), First())
    pipe = GPipe(layers, [1, 2], chunks=2)
    number = torch.tensor(3)
    for length in (5, 9, 7, 12, 30):
        x = features(4, length).requires_grad_()
        own = pipe((x, gpipe_fast.replicate(number)))
        (gradient,) = torch.autograd.grad(own.square().sum(), x)
        parts = [layers((part, number)) for part in x.chunk(2)]
        (expected,) = torch.autograd.grad(sum(part.square().sum() for part in parts), x)
        assert torch.equal(own, torch.cat(parts))
        assert torch.equal(gradient, expected)
    # Two lengths, a template, and one for the layout in which the first gradient arrived.
    assert compiler_of(pipe).num_instantiated >= 2 * 2


def test_length_one_has_a_trace_of_its_own() -> None:
    layers = gpt()
    pipe = GPipe(layers, [5], chunks=2)
    for length in (5, 1, 7, 6, 1, 3):
        x = tokens(4, length)
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == [], length
    assert compiler_of(pipe).num_traces <= 5


def test_images_of_many_sizes_equal_the_plain_loop() -> None:
    layers = conv()
    pipe = GPipe(layers, [4, 5], chunks=2)
    for height, width in [(8, 8), (10, 8), (12, 8), (9, 11), (13, 12)]:
        x = torch.randn(4, height, width, generator=torch.Generator().manual_seed(height))
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


@pytest.mark.sampled(2)
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


@pytest.mark.extended
def test_a_template_gives_the_graph_of_a_separate_trace() -> None:
    layers = nn.Sequential(Block(), Block())
    template = template_after(layers, 5, 7, 9)
    for length in (2, 3, 10, 33):
        x = features(4, length)
        written = template.instantiate([tuple(x.shape)], [x.stride()], ())
        assert written is not None
        assert equal(written, trace_joint(layers, x))
        assert not equal(written, trace_joint(layers, features(4, length + 1)))


def test_a_template_rejects_shapes_that_violate_its_guards() -> None:
    template = template_after(nn.Sequential(FunctionLayer(branch_on_length)), 3, 4, 5)

    def written(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
        return template.instantiate([shape], [strides], ()) is not None

    assert written((4, 6, WIDTH), (6 * WIDTH, WIDTH, 1))
    assert not written((4, 8, WIDTH), (8 * WIDTH, WIDTH, 1))  # takes the other branch
    assert not written((5, 6, WIDTH), (6 * WIDTH, WIDTH, 1))  # a size that never varied
    assert not written((4, 1, WIDTH), (WIDTH, WIDTH, 1))  # too small
    assert not written((4, 6, WIDTH), (WIDTH, 4 * WIDTH, 1))  # permuted


def test_a_template_without_guards_gives_a_wrong_graph() -> None:
    layers = nn.Sequential(FunctionLayer(branch_on_length))
    template = template_after(layers, 3, 4, 5)
    ranges = {symbol: (2, float("inf")) for symbol in template.symbols.ranges}
    symbols = replace(template.symbols, guards=(), ranges=ranges)
    x = features(4, 9)
    written = Template(template.joint, symbols).instantiate([tuple(x.shape)], [x.stride()], ())
    assert written is not None
    assert not equal(written, trace_joint(layers, x))


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
    layers = nn.Sequential(Block())
    expected = trace_joint(layers, features(4, 5))

    def changed(change: Callable[[JointGraph, list[fx.Node]], object]) -> bool:
        joint = trace_joint(layers, features(4, 5))
        assert equal(joint, expected)
        change(joint, [n for n in joint.module.graph.nodes if n.op == "call_function"])
        return not equal(joint, expected)

    def other_target(joint: JointGraph, nodes: list[fx.Node]) -> None:
        node = next(n for n in nodes if n.target is torch.ops.aten.add.Tensor)
        node.target = torch.ops.aten.sub.Tensor

    def other_number(joint: JointGraph, nodes: list[fx.Node]) -> None:
        node = next(n for n in nodes if n.target is torch.ops.aten.view.default)
        node.args = (node.args[0], [*node.args[1][:-1], -1])  # type: ignore[index, misc]

    def other_shape(joint: JointGraph, nodes: list[fx.Node]) -> None:
        nodes[-1].meta["val"] = torch.empty(1)

    def other_argument(joint: JointGraph, nodes: list[fx.Node]) -> None:
        node = next(n for n in nodes if n.target is torch.ops.aten.mm.default)
        node.args = (node.args[1], node.args[0])

    for change in (other_target, other_number, other_shape, other_argument):
        assert changed(change), change.__name__
    assert not equal(replace(expected, outputs=expected.outputs[::-1]), expected)


def test_symbols_solve_only_shapes_that_fit() -> None:
    template = template_after(nn.Sequential(Block()), 5, 7, 9)
    symbols: Symbols = template.symbols
    strides = [(1,), (6 * WIDTH, WIDTH, 1)]
    assert symbols.solve([(3,), (4, 6, WIDTH)], strides) is not None
    assert symbols.solve([(3,), (4, 6, WIDTH + 1)], strides) is None
    assert symbols.solve([(4,), (4, 6, WIDTH)], strides) is None
    assert symbols.solve([(3,), (4, 6, WIDTH)], [(1,), (6 * WIDTH, WIDTH, 2)]) is None
    assert list(template.joint.of(GraphRole.INPUT)) == [0]
