"""Program templates: the program of each length equals, as data, the one that lowering its graph gives."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast._extension import Arena
from gpipe_fast._extension import Program as NativeProgram
from gpipe_fast.lower import bitwise_addmm, program_template
from gpipe_fast.lower.accumulation import AccumulationPolicy
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE, NO_RECOMPUTE
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.program import StorageKind
from gpipe_fast.lower.program_template import (
    Program,
    ProgramsOfStage,
    ProgramTemplates,
    SizedProgram,
    are_equal,
    lower_graphs,
)
from gpipe_fast.lower.split import split
from gpipe_fast.runtime.compile import Compiler, TracedStage
from gpipe_fast.runtime.stage import BoundarySpec, Stage, TensorSpec
from gpipe_fast.strides import span
from gpipe_fast.trace.symbolic import Instance
from tests.internals import compiler_of
from tests.reference import loop_step, pipeline_step, unequal
from tests.stages import trace_joint

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, HEADS, VOCABULARY = 16, 2, 11
ACCUMULATION = AccumulationPolicy()


class Block(nn.Module):
    """Causal attention with a mask made from the length, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.down, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        scores = query @ key.transpose(-2, -1)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        y = scores.masked_fill(mask, float("-inf")).softmax(-1) @ value
        result: Tensor = x + self.drop(F.gelu(self.down(y.transpose(1, 2).reshape(batch, length, -1))))
        return result


def gpt() -> list[nn.Module]:
    return [nn.Embedding(VOCABULARY, WIDTH), Block(), nn.Linear(WIDTH, VOCABULARY)]


def mlp() -> list[nn.Module]:
    return [nn.Linear(WIDTH, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 4)]


def tokens(batch: int, length: int) -> list[Tensor]:
    return [torch.randint(VOCABULARY, (batch, length + 1))[:, :-1]]


def features(batch: int, _: int) -> list[Tensor]:
    return [torch.randn(batch, WIDTH, requires_grad=True)]


def pairs(seed: int, low: int, high: int, same_first: int | None = None) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [(same_first or draw.randint(low, high), draw.randint(low, high)) for _ in range(5)]


# Some lengths equal the width or another size of the model.
LENGTHS = [*pairs(0, 2, 70, 4), (4, WIDTH), (4, 2 * WIDTH), (4, 3 * WIDTH), (4, 4), (4, WIDTH // 2)]
CASES: dict[
    str, tuple[Callable[[], list[nn.Module]], Callable[[int, int], list[Tensor]], list[tuple[int, int]]]
]
CASES = {
    "gpt": (gpt, tokens, LENGTHS),
    "gpt, batch and length": (gpt, tokens, pairs(1, 2, 40)),
    "mlp": (mlp, features, pairs(3, 4, 90)),
}


class Lengths:
    """A stage that is traced for one shape after another."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.compiler, self.stage = Compiler(), Stage(list(layers), 0, torch.device("cpu"))

    def traced(self, tensors: Sequence[Tensor]) -> TracedStage:
        specs = tuple(TensorSpec.of(t, t.requires_grad) for t in tensors)
        traced = self.compiler.trace(self.stage, BoundarySpec(specs), ())
        assert isinstance(traced, TracedStage)
        return traced

    def instances(self, inputs: Iterable[Sequence[Tensor]]) -> list[Instance]:
        """Returns the instances of templates among the traces for these inputs."""
        graphs = [self.traced(tensors).graph for tensors in inputs]
        return [graph for graph in graphs if isinstance(graph, Instance)]


def lowered(instance: Instance, fraction: float) -> ProgramsOfStage:
    parts = split(instance.joint, fraction, ladder=ProgramTemplates.of(instance.template).ladder)
    return lower_graphs(parts.forward, parts.backward, ACCUMULATION)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_programs_of_all_lengths_equal_those_lowered_concretely(case: str) -> None:
    torch.manual_seed(0)
    make, inputs, shapes = CASES[case]
    instances = Lengths(make()).instances(inputs(*shape) for shape in shapes)
    assert len(instances) >= len(shapes) - 5
    for fraction in (FULL_RECOMPUTE, 0.6, NO_RECOMPUTE):
        with mock.patch.object(program_template, "_lower", wraps=program_template._lower) as concretely:
            for instance in instances:
                found = ProgramTemplates.of(instance.template).at(instance, fraction, ACCUMULATION)
                assert are_equal(found, lowered(instance, fraction)), instance.values
        # The others were derived: the first of each template, and coincidences, are lowered concretely; so is
        # a length at which another rung of the ladder is the furthest.
        if fraction in (FULL_RECOMPUTE, NO_RECOMPUTE):
            assert concretely.call_count <= 1 + len(instances) / 2


def run(program: Program, arena: Arena) -> tuple[NativeProgram, list[Tensor]]:
    """Builds a program, and returns it with its results and gradients for random tensors."""
    native = program.build(arena, torch.device("cpu"), parameters=range(9), titles=["layer"] * 9)
    generator, written = torch.Generator().manual_seed(0), program.written()

    def tensors(kind: StorageKind) -> list[Tensor]:
        values = {value.index: value for value in written.values if value.storage is kind}
        if kind is StorageKind.INPUT:
            values = dict(enumerate(value for value in written.values if value.storage is kind))
        drawn = {}
        for index, value in values.items():
            numbers = torch.randint(VOCABULARY, (span(value.sizes, value.strides),), generator=generator)
            drawn[index] = numbers.to(value.dtype).as_strided(value.sizes, value.strides)
        return [drawn.get(index, torch.empty(0)) for index in range(max(drawn, default=-1) + 1)]

    native.bind(tensors(StorageKind.PARAMETER))
    results, gradients = native.run(tensors(StorageKind.INPUT), [None] * 9, first=True)
    return native, [*results, *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_copies_for_other_lengths_compute_what_programs_built_for_them_do(case: str) -> None:
    torch.manual_seed(0)
    make, inputs, shapes = CASES[case]
    instances = Lengths(make()).instances(inputs(*shape) for shape in shapes)
    arena, num_built = Arena(), 0
    for fraction, instance in itertools.product((FULL_RECOMPUTE, NO_RECOMPUTE), instances):
        found = ProgramTemplates.of(instance.template).at(instance, fraction, ACCUMULATION)
        for program in found:
            if isinstance(program, SizedProgram):
                native, results = run(program, arena)
                expected, expected_results = run(program.written(), Arena())
                assert native.arena_bytes == expected.arena_bytes
                assert len(results) == len(expected_results)
                for result, other in zip(results, expected_results, strict=True):
                    assert result.stride() == other.stride()
                    assert torch.equal(result.nan_to_num(), other.nan_to_num())
                num_built += 1
    templates = {id(instance.template): ProgramTemplates.of(instance.template) for instance in instances}
    variants = [v for each in templates.values() for kept in each._variants.values() for v in kept or ()]
    originals = sum(part.num_natives for v in variants for part in v.templates if part)
    assert num_built > originals > 0


@functools.cache
def lengths_of_gpt() -> Lengths:
    torch.manual_seed(0)
    return Lengths(gpt())


def gpt_instances(*lengths: int) -> list[Instance]:
    """Returns instances without a graph, of a template that has no programs yet."""
    found = lengths_of_gpt().instances(tokens(4, length) for length in (5, 9, *lengths))
    found[0].template.derived.clear()
    return [replace(instance) for instance in found]


@pytest.fixture
def short_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products may add to an accumulator only if they sum fewer than 100 products."""
    monkeypatch.setattr(bitwise_addmm, "_trials_are_equal", lambda a, b, dtype, threads: a[0][1] < 100)


@pytest.mark.usefixtures("short_sums")
def test_a_length_at_which_decisions_differ_is_lowered_again() -> None:
    instances = gpt_instances(7, 30, 10, 45)  # four sequences each
    templates = ProgramTemplates.of(instances[0].template)
    found = [templates.at(instance, NO_RECOMPUTE, ACCUMULATION) for instance in instances]
    assert ["joint" in vars(instance) for instance in instances] == [True, True, False, False]
    for programs, instance in zip(found, instances, strict=True):
        assert are_equal(programs, lowered(instance, NO_RECOMPUTE))


def test_a_template_that_derives_another_program_is_not_used() -> None:
    first, *others = gpt_instances(7, 12, 30)
    templates = ProgramTemplates.of(first.template)
    at = program_template.ProgramTemplate.at

    def wrong(self: program_template.ProgramTemplate, numbers: Sequence[int]) -> object:
        program = at(self, numbers)
        program.arena_bytes += 64
        return program

    with mock.patch.object(program_template.ProgramTemplate, "at", wrong):
        for instance in (first, *others):
            found = templates.at(instance, FULL_RECOMPUTE, ACCUMULATION)
            assert are_equal(found, lowered(instance, FULL_RECOMPUTE))


def test_a_graph_without_formulas_is_lowered_concretely() -> None:
    first, *others = gpt_instances(7, 12)
    templates = ProgramTemplates.of(first.template)
    error = program_template.CannotExpressError
    with mock.patch.object(program_template, "lower_unplaced", side_effect=error):
        for instance in (first, *others):
            found = templates.at(instance, FULL_RECOMPUTE, ACCUMULATION)
            assert are_equal(found, lowered(instance, FULL_RECOMPUTE))


def test_training_on_many_lengths_lowers_concretely_only_at_first() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*gpt())
    pipe = GPipe(layers, [2, 1], chunks=2)
    for length in (5, 9, 7):
        (x,) = tokens(4, length)
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == [], length
    with mock.patch.object(program_template, "_lower", side_effect=AssertionError):
        for length in (12, 30):
            (x,) = tokens(4, length)
            assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == [], length
    assert compiler_of(pipe).num_instantiated == 2 * 3
    assert pipe.explain(x).stages, "explains an instantiated length"


def test_programs_differ_if_any_part_differs() -> None:
    graph = split(trace_joint([nn.Linear(4, 4), nn.Tanh()], torch.randn(2, 4)), FULL_RECOMPUTE).forward
    for change in (
        lambda program: program.values.pop(),
        lambda program: program.steps.reverse(),
        lambda program: program.results.append(0),
        lambda program: setattr(program, "arena_bytes", float(program.arena_bytes)),
    ):
        one, other = lower(graph), lower(graph)
        assert are_equal(one, other)
        change(other)
        assert not are_equal(one, other)
    assert not are_equal(1, True)
    assert not are_equal(torch.ones(1), torch.ones(1)), "constants must be the same tensor"
