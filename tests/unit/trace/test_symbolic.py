"""Templates: one trace for many shapes gives the graph that a trace of each would give, or is not used."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from gpipe_fast import GPipe
from gpipe_fast.runtime.compile import Compiler, Traced
from gpipe_fast.runtime.stage import Boundary, Spec, Stage
from gpipe_fast.trace.aot import Symbols
from gpipe_fast.trace.symbolic import Template, equal
from gpipe_fast.trace.trace import Joint, Role, trace
from tests.inside import compiler_of, template_of
from tests.reference import loop_step, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, HEADS, VOCABULARY = 16, 2, 11
CPU = torch.device("cpu")


class Of(nn.Module):
    """A function of a linear layer and of what comes in."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear, x)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.tokens(x) + self.places[: x.shape[1]]
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
    return nn.Sequential(Embedded(), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))


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
def test_lengths_and_batch_sizes_of_a_gpt_share_two_templates(checkpoint: str) -> None:
    layers = gpt()
    pipe = GPipe(layers, [2, 3], chunks=4, checkpoint=checkpoint)
    draw = random.Random(0)
    shapes = [(8, draw.randint(2, 64)) for _ in range(12)] + [(draw.randint(1, 4) * 4, 9) for _ in range(4)]
    for batch, length in shapes:
        x = tokens(batch, length)
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 4)) == [], (batch, length)
    compiler = compiler_of(pipe)
    # Of each stage two lengths and a template; for another batch size two more templates at most.
    assert compiler.num_traces <= 2 * 5
    assert compiler.num_written >= 2 * 10


def test_texts_that_are_views_of_longer_ones() -> None:
    """As language models are trained: all tokens but the last, whose strides are one longer."""
    layers = gpt()
    pipe = GPipe(layers, [2, 3], chunks=2)
    for length in (5, 9, 7, 12, 30, 22, 3):
        x = tokens(4, length + 1)[:, :-1]
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == [], length
    assert compiler_of(pipe).num_traces <= 2 * 3


def test_length_one_is_traced_as_it_is() -> None:
    layers = gpt()
    pipe = GPipe(layers, [5], chunks=2)
    for length in (5, 1, 7, 6, 1, 2, 3):
        x = tokens(4, length)
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == [], length
    assert compiler_of(pipe).num_traces <= 5


def test_images_of_many_sizes() -> None:
    layers = conv()
    pipe = GPipe(layers, [4, 5], chunks=2)
    for height, width in [(8, 8), (10, 8), (12, 8), (14, 8), (9, 11), (13, 12), (16, 10)]:
        x = torch.randn(4, height, width, generator=torch.Generator().manual_seed(height))
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == [], (height, width)


def test_gradients_that_arrive_permuted_or_expanded() -> None:
    layers = nn.Sequential(
        Of(lambda f, x: f(x)), Of(lambda f, x: f(x).transpose(1, 2).contiguous().transpose(1, 2))
    )
    layers.append(Of(lambda f, x: f(x).mean(1, keepdim=True).expand_as(x)))
    pipe = GPipe(layers, [1, 1, 1], chunks=2)
    for length in (4, 5, 6, 7, 9, 12):
        x = features(6, length)
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == [], length
    assert compiler_of(pipe).num_written > 0


def by_size(f: nn.Module, x: Tensor) -> Tensor:
    """Another graph from length 8 on."""
    y: Tensor = f(x)
    return y.tanh() if x.shape[1] < 8 else y.sigmoid()


def parity(f: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = f(x)
    return y.tanh() if x.shape[1] % 2 else y.sigmoid()


def scaled(f: nn.Module, x: Tensor) -> Tensor:
    """A number that Python rounds twice."""
    y: Tensor = f(x) * (1.0 / x.shape[1] ** 0.5)
    return y


def unrolled(f: nn.Module, x: Tensor) -> Tensor:
    """As many operators as places."""
    state = torch.zeros_like(x[:, 0])
    for place in range(x.shape[1]):
        state = torch.tanh(f(x[:, place]) + state)
    return state


@pytest.mark.sampled(2)
@pytest.mark.smoke
@pytest.mark.parametrize("function", [by_size, parity, scaled, unrolled])
def test_what_depends_on_sizes_otherwise_is_right(function: Callable[[nn.Module, Tensor], Tensor]) -> None:
    layers = nn.Sequential(Of(function), nn.Linear(WIDTH, 2))
    pipe = GPipe(layers, [1, 1], chunks=2)
    for length in (3, 4, 5, 6, 7, 8, 9, 10, 11, 3, 9):
        x = features(4, length)
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == [], length


def test_many_shapes_without_a_template_end_in_python_after_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpipe_fast.runtime.planner.TRACES", 8)
    layers = nn.Sequential(Of(unrolled), nn.Linear(WIDTH, 2))
    pipe = GPipe(layers, [1, 1], chunks=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (*range(2, 16), 3):
            x = features(2, length)
            assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 1)) == [], length
    messages = [str(w.message) for w in caught if "not traced for" in str(w.message)]
    assert len(messages) == 1
    assert "the module runs in Python for inputs that it was not traced for: it was traced 8" in messages[0]
    assert 8 <= compiler_of(pipe).num_traces <= 8 + 6


def test_under_aten_every_shape_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are: no layer may run in Python instead."""
    monkeypatch.setattr("gpipe_fast.runtime.planner.TRACES", 2)
    layers = nn.Sequential(Of(unrolled))
    pipe = GPipe(layers, [1], backend="aten")
    with torch.no_grad():
        for length in range(2, 10):
            x = features(1, length)
            assert torch.equal(pipe(x), layers(x)), length
    # A trace of each length, and attempts at a template.
    assert compiler_of(pipe).num_traces >= len(range(2, 10))
    assert compiler_of(pipe).num_written == 0


def joint_of(layers: nn.Sequential, x: Tensor) -> Joint:
    joint = trace(list(layers), [x.requires_grad_(x.is_floating_point())])
    assert isinstance(joint, Joint)
    return joint


def template_after(layers: nn.Sequential, *lengths: int) -> Template:
    """The one that a compiler makes when it meets these lengths."""
    compiler, stage = Compiler(), Stage(list(layers), 0, CPU)
    for length in lengths:
        x = features(4, length).requires_grad_()
        assert isinstance(compiler.trace(stage, Boundary((Spec.of(x, True),)), ()), Traced)
    template = template_of(compiler)
    assert template is not None
    return template


@pytest.mark.extended
def test_a_template_is_the_trace() -> None:
    layers = nn.Sequential(Block(), Block())
    template = template_after(layers, 5, 7, 9)
    for length in (2, 3, 10, 33):
        x = features(4, length)
        written = template.write_out([tuple(x.shape)], [x.stride()], ())
        assert written is not None
        assert equal(written, joint_of(layers, x))
        assert not equal(written, joint_of(layers, features(4, length + 1)))


def test_a_template_refuses_what_it_was_not_made_for() -> None:
    template = template_after(nn.Sequential(Of(by_size)), 3, 4, 5)

    def written(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
        return template.write_out([shape], [strides], ()) is not None

    assert written((4, 6, WIDTH), (6 * WIDTH, WIDTH, 1))
    assert not written((4, 8, WIDTH), (8 * WIDTH, WIDTH, 1))  # the branch
    assert not written((5, 6, WIDTH), (6 * WIDTH, WIDTH, 1))  # a size that never varied
    assert not written((4, 1, WIDTH), (WIDTH, WIDTH, 1))  # too small
    assert not written((4, 6, WIDTH), (WIDTH, 4 * WIDTH, 1))  # permuted


def test_without_rule_guards_are_not_looked_at_and_the_graph_is_wrong() -> None:
    layers = nn.Sequential(Of(by_size))
    template = template_after(layers, 3, 4, 5)
    ranges = {symbol: (2, float("inf")) for symbol in template.symbols.ranges}
    symbols = replace(template.symbols, guards=(), ranges=ranges)
    x = features(4, 9)
    written = Template(template.joint, symbols).write_out([tuple(x.shape)], [x.stride()], ())
    assert written is not None
    assert not equal(written, joint_of(layers, x))


def test_two_sizes_that_only_happened_to_be_equal_make_another_template() -> None:
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
        for mine, his in zip(
            torch.autograd.grad(ours.square().sum(), (a, b)),
            torch.autograd.grad(expected.square().sum(), (a, b)),
            strict=True,
        ):
            assert torch.equal(mine, his)


def test_equal_notices_every_difference() -> None:
    layers = nn.Sequential(Block())

    def changed(change: Callable[[Joint, list[fx.Node]], object]) -> bool:
        joint = joint_of(layers, features(4, 5))
        assert equal(joint, joint_of(layers, features(4, 5)))
        change(joint, [n for n in joint.module.graph.nodes if n.op == "call_function"])
        return not equal(joint, joint_of(layers, features(4, 5)))

    def other_target(joint: Joint, nodes: list[fx.Node]) -> None:
        node = next(n for n in nodes if n.target is torch.ops.aten.add.Tensor)
        node.target = torch.ops.aten.sub.Tensor

    def other_number(joint: Joint, nodes: list[fx.Node]) -> None:
        node = next(n for n in nodes if n.target is torch.ops.aten.view.default)
        node.args = (node.args[0], [*node.args[1][:-1], -1])  # type: ignore[index, misc]

    def other_shape(joint: Joint, nodes: list[fx.Node]) -> None:
        nodes[-1].meta["val"] = torch.empty(1)

    def other_argument(joint: Joint, nodes: list[fx.Node]) -> None:
        node = next(n for n in nodes if n.target is torch.ops.aten.mm.default)
        node.args = (node.args[1], node.args[0])

    for change in (other_target, other_number, other_shape, other_argument):
        assert changed(change), change.__name__
    joint = joint_of(layers, features(4, 5))
    assert not equal(replace(joint, outputs=joint.outputs[::-1]), joint)


def test_symbols_solve_only_what_fits() -> None:
    template = template_after(nn.Sequential(Block()), 5, 7, 9)
    symbols: Symbols = template.symbols
    strides = [(1,), (6 * WIDTH, WIDTH, 1)]
    assert symbols.solve([(3,), (4, 6, WIDTH)], strides) is not None
    assert symbols.solve([(3,), (4, 6, WIDTH + 1)], strides) is None
    assert symbols.solve([(4,), (4, 6, WIDTH)], strides) is None
    assert symbols.solve([(3,), (4, 6, WIDTH)], [(1,), (6 * WIDTH, WIDTH, 2)]) is None
    assert list(template.joint.of(Role.INPUT)) == [0]
