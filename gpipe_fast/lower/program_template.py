"""Program templates: a template lowered once, with formulas for sizes; a new length only evaluates them.

The graph of a template is split and lowered with formulas in place of sizes. Every decision that depends on
sizes is recorded as a condition (gpipe_fast/trace/formulas.py), so that for another length there is nothing
left to decide. The example of gpipe_fast/trace/symbolic.py goes on::

    template     (4, s0, 64)   lowered at s0 = 31: program with formulas, conditions
    s0 = 31                    lowered concretely, too: the two programs must be equal
    s0 = 45                    conditions hold: formulas evaluated, a copy of the C++ program gets the numbers
    s0 = 64                    a condition fails, such as s0 != 64: lowered once more, at s0 = 64
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpipe_fast._extension import Arena, Resizing
from gpipe_fast._extension import Program as NativeProgram
from gpipe_fast.lower.accumulation import AccumulationPolicy
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE, NO_RECOMPUTE, SAVE_ATTENTION, SavedFraction
from gpipe_fast.lower.ladder import Ladder
from gpipe_fast.lower.lower import lower, lower_unplaced
from gpipe_fast.lower.memory import MemoryPlan
from gpipe_fast.lower.program import ProgramIR, StorageKind, Value, are_whole
from gpipe_fast.lower.split import StageGraph, split
from gpipe_fast.lower.steps import Call
from gpipe_fast.trace.formulas import Evaluator, has_formula, substitute
from gpipe_fast.trace.garbage import collector_paused
from gpipe_fast.trace.joint_graph import JointGraph
from gpipe_fast.trace.symbolic import Instance, Template
from gpipe_fast.trace.symbols import CannotExpressError

# The maximum number of sets of decisions for which programs are kept, per template and saved fraction; the
# least recently used are dropped.
_MAX_VARIANTS = 8
# After so many lengths in a row for which none of them held, no more are made.
_MAX_MISSES = 8

# The maximum number of C++ programs that a template keeps to copy them, one for each stage.
_MAX_NATIVES = 64


def lower_graphs(
    forward: StageGraph,
    backward: StageGraph | None,
    accumulation: AccumulationPolicy,
    weights: StageGraph | None = None,
) -> ProgramsOfStage:
    """Lowers the graphs of a stage; the forward accumulates no gradients."""
    return (
        lower(forward),
        None if backward is None else lower(backward, accumulation),
        None if weights is None else lower(weights, accumulation),
    )


class ProgramTemplate:
    """A program with formulas.

    Attributes:
        program: the program, with formulas and without offsets in the arena.
        num_values: the number of its values.
    """

    def __init__(self, program: ProgramIR, memory: MemoryPlan) -> None:
        """Makes a template from a program without offsets in the arena, and its memory plan."""
        self.num_values = len(program.values)
        self.program = program
        self._memory = memory
        # By stage, the C++ program for the first numbers.
        self._natives: OrderedDict[Hashable, NativeProgram] = OrderedDict()
        # What depends on formulas, each once, and its position.
        self._known: list[Any] = []
        self._positions: dict[str, int] = {}
        self._values = [
            (i, value, [self._position(part) for part in (value.sizes, value.strides, value.offset)])
            for i, value in enumerate(program.values)
            if value.storage is StorageKind.ARENA or has_formula((value.sizes, value.strides, value.offset))
        ]
        self._constants = [
            (i, j, self._position(argument))
            for i, step in enumerate(program.steps)
            if isinstance(step, Call)
            for j, argument in enumerate(step.arguments)
            if has_formula(argument)
        ]
        self._sizes = [self._position(each.size) for each in memory.chains]
        self._resizing = Resizing(
            [(i, sizes, strides, offset) for i, _, (sizes, strides, offset) in self._values],
            self._constants,
            [
                (each.values, size, each.begin, each.end)
                for each, size in zip(memory.chains, self._sizes, strict=True)
            ],
            memory.alignment,
        )
        self._allocated = program.allocated_results()

    @property
    def num_natives(self) -> int:
        """The number of C++ programs that are kept to copy them."""
        return len(self._natives)

    def _position(self, argument: Any) -> int:
        position = self._positions.setdefault(repr(argument), len(self._known))
        if position == len(self._known):
            self._known.append(argument)
        return position

    def at(self, numbers: Sequence[int]) -> ProgramIR:
        """Returns the program with numbers in place of formulas, and with offsets in the arena."""
        known = self._known_at(numbers)
        values, steps = list(self.program.values), list(self.program.steps)
        chains = [
            each._replace(size=known[size])
            for each, size in zip(self._memory.chains, self._sizes, strict=True)
        ]
        for i, value, (sizes, strides, offset) in self._values:
            values[i] = replace(
                value,
                sizes=known[sizes],
                strides=known[strides],
                offset=known[offset],
            )
        for i, j, argument in self._constants:
            step = steps[i]
            assert isinstance(step, Call)
            arguments = (*step.arguments[:j], known[argument], *step.arguments[j + 1 :])
            steps[i] = replace(step, arguments=arguments)
        program = replace(self.program, values=values, steps=steps)
        replace(self._memory, chains=chains).place(program)
        return program

    def build(self, numbers: Sequence[int], arena: Arena, device: torch.device, **how: Any) -> NativeProgram:
        """Builds the C++ program for numbers: after the first one of a stage, a copy with other sizes.

        Args:
            numbers: the numbers in place of formulas.
            arena: as for `ProgramIR.build`.
            device: as for `ProgramIR.build`.
            how: as for `ProgramIR.build`; of equal stages, equal.
        """
        parameters, titles = (tuple(how.get(name, ())) for name in ("parameters", "titles"))
        key = arena, device, how.get("lowered_for"), parameters, titles
        known = self._natives.get(key)
        if known is None:
            while len(self._natives) >= _MAX_NATIVES:
                self._natives.popitem(last=False)
            known = self._natives[key] = self.at(numbers).build(arena, device, **how)
            return known
        found = known.resized(self._resizing, self._known_at(numbers))
        found.set_placeable(are_whole(self._allocated, functools.partial(self._value_at, numbers)))
        return found

    def _known_at(self, numbers: Sequence[int]) -> list[Any]:
        return [substitute(argument, numbers) for argument in self._known]

    def _value_at(self, numbers: Sequence[int], index: int) -> Value:
        value = self.program.values[index]
        return replace(
            value, sizes=substitute(value.sizes, numbers), strides=substitute(value.strides, numbers)
        )


class SizedProgram:
    """The program of a template for some numbers.

    Attributes:
        inputs: as of `ProgramIR`.
        outputs: as of `ProgramIR`.
        gradients: as of `ProgramIR`.
        num_values: as of `ProgramIR`.
    """

    def __init__(self, template: ProgramTemplate, numbers: Sequence[int]) -> None:
        program = template.program
        self.inputs, self.outputs, self.gradients = program.inputs, program.outputs, program.gradients
        self.num_values = template.num_values
        self._template, self._numbers = template, numbers

    def constant_bytes(self) -> int:
        """Returns the bytes of the program's constants."""
        return self._template.program.constant_bytes()

    @functools.cached_property
    def _written(self) -> ProgramIR:
        return self._template.at(self._numbers)

    def written(self) -> ProgramIR:
        """Returns the program with its values and steps, which is written on first use."""
        return self._written

    def build(self, arena: Arena, device: torch.device, **how: Any) -> NativeProgram:
        """Builds the C++ program; arguments as for `ProgramIR.build`."""
        return self._template.build(self._numbers, arena, device, **how)


# A program, or one that is written out when its values or steps are read.
Program = ProgramIR | SizedProgram
# The forward, the backward, and what it leaves to a later program, as in `SplitGraphs`.
ProgramsOfStage = tuple[Program, Program | None, Program | None]


@dataclass(frozen=True)
class _Variant:
    """The programs of a stage with formulas, for the lengths at which the conditions hold."""

    evaluate: Evaluator
    templates: tuple[ProgramTemplate | None, ...]

    def at(self, instance: Instance) -> ProgramsOfStage | None:
        numbers = self.evaluate(instance.values)
        if numbers is None:
            return None
        forward, backward, weights = (
            None if each is None else SizedProgram(each, numbers) for each in self.templates
        )
        assert forward is not None
        return forward, backward, weights


class _Key(NamedTuple):
    """What programs depend on besides the template; as for `split`."""

    saved_fraction: SavedFraction
    accumulation: AccumulationPolicy
    defers_weights: bool


class ProgramTemplates:
    """The programs of one template.

    Attributes:
        ladder: the ladder of the first length that needed one. For each length, the rung is chosen by the
            bytes at this length, and the comparisons are conditions.
    """

    def __init__(self, template: Template) -> None:
        """Makes an empty set of programs."""
        self._template = template
        # None for programs that cannot be lowered with formulas.
        self._variants: dict[_Key, tuple[_Variant, ...] | None] = {}
        self._num_misses: Counter[_Key] = Counter()
        self.ladder: Ladder | None = None

    def num_values(self) -> int:
        """Returns the number of values of the programs with formulas."""
        variants = [variant for kept in list(self._variants.values()) for variant in kept or ()]
        templates = filter(None, chain.from_iterable(each.templates for each in variants))
        return sum(each.num_values * (1 + each.num_natives) for each in templates)

    @classmethod
    def of(cls, template: Template) -> ProgramTemplates:
        """Returns the programs of a template, which the template keeps."""
        found = template.derived.get(cls)
        if found is None:
            found = template.derived[cls] = cls(template)
        assert isinstance(found, ProgramTemplates)
        return found

    def at(
        self,
        instance: Instance,
        saved_fraction: SavedFraction,
        accumulation: AccumulationPolicy,
        defers_weights: bool = False,
    ) -> ProgramsOfStage:
        """Returns the programs of an instance, as if it had been lowered.

        Args:
            instance: an instance of the template.
            saved_fraction: as for `split`.
            accumulation: how gradients of parameters are accumulated.
            defers_weights: as for `split`.
        """
        key = _Key(saved_fraction, accumulation, defers_weights)
        variants = self._variants.setdefault(key, ())
        for variant in variants or ():
            programs = variant.at(instance)
            if programs is not None:
                self._add(key, variant)
                self._num_misses[key] = 0
                return programs
        return self._lowered(instance, key, variants)

    @collector_paused()
    def _lowered(
        self, instance: Instance, key: _Key, variants: tuple[_Variant, ...] | None
    ) -> ProgramsOfStage:
        """Lowers an instance, and with formulas, too, for further ones."""
        if self.ladder is None and key.saved_fraction not in (FULL_RECOMPUTE, NO_RECOMPUTE, SAVE_ATTENTION):
            self.ladder = Ladder.of(instance.joint)
        expected = _lower(instance.joint, key, self.ladder)
        if variants is not None and self._num_misses[key] < _MAX_MISSES:
            self._num_misses[key] += 1
            found = self._lower_with_formulas(instance, key)
            if found is None or not are_equal(found.at(instance), expected):
                self._variants[key] = None
            else:
                self._add(key, found)
        return expected

    def _add(self, key: _Key, latest: _Variant) -> None:
        """Makes a variant the first; another thread may do the same, so that no tuple is changed."""
        others = (variant for variant in self._variants[key] or () if variant is not latest)
        self._variants[key] = (latest, *others)[:_MAX_VARIANTS]

    def _lower_with_formulas(self, instance: Instance, key: _Key) -> _Variant | None:
        try:
            joint, formulas = self._template.with_formulas(instance.values)
            parts = split(joint, key.saved_fraction, defers_weights=key.defers_weights, ladder=self.ladder)
            templates = tuple(
                None if graph is None else ProgramTemplate(*lower_unplaced(graph, key.accumulation))
                for graph in (parts.forward, parts.backward, parts.weights)
            )
        except (CannotExpressError, TypeError):  # an operation that formulas lack
            return None
        return _Variant(formulas.evaluator(), templates)


def _lower(joint: JointGraph, key: _Key, ladder: Ladder | None) -> ProgramsOfStage:
    parts = split(joint, key.saved_fraction, defers_weights=key.defers_weights, ladder=ladder)
    return lower_graphs(parts.forward, parts.backward, key.accumulation, parts.weights)


def are_equal(a: Any, b: Any) -> bool:
    """Returns whether programs, or parts of programs, are equal, also in the types of numbers."""
    a, b = (each.written() if isinstance(each, SizedProgram) else each for each in (a, b))
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, Tensor):
        return False
    if isinstance(a, (ProgramIR, Value, Call)):
        return all(are_equal(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(are_equal, a, b))
    return bool(a == b)
