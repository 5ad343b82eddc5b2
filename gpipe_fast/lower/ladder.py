"""A stage's ladder: from saving nothing for the backward to saving all that it reads, in nested steps.

Some of the 48 rungs of 6 GPT blocks of width 256, each with the values that are saved from there on; the time
is that of all recomputed operators::

    bytes   recompute
      0 %       100 %
      1 %        95 %   the last block's output
      6 %        73 %   the last block's attention
     21 %        51 %   its queries, keys and values
     41 %        27 %   its first linear layer's output in the MLP
     50 %        17 %
     62 %         3 %   the same of the first block
    100 %         0 %   the first block's GELU: all that the backward reads

A share of the bytes of the last rung takes the furthest rung within it: it never keeps more, and a larger
share never recomputes more. Each rung spares the operators that take most time for the bytes that it adds
(`Choices.nested`). For blocks of GPT, ResNet and encoders, exact minimum cuts recomputed mostly for as long,
and at most a tenth less.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

from torch import fx

from gpipe_fast.lower.alias import source_of
from gpipe_fast.lower.operator_times import nanoseconds
from gpipe_fast.trace.collectives import is_collective
from gpipe_fast.trace.joint_graph import JointGraph, dequantized
from gpipe_fast.trace.tensor_metadata import AnyTensor

Recomputed = frozenset[int]


class Operator(NamedTuple):
    """An operator of the forward.

    Attributes:
        time: the time that it takes; positive.
        reads: the values that it reads, as indices.
    """

    time: int
    reads: frozenset[int]


class SaveableValue(NamedTuple):
    """A value of the forward that can be saved.

    Attributes:
        size: in bytes.
        operator: the index of the operator that computes the value.
        in_backward: whether the backward reads the value.
    """

    size: int
    operator: int
    in_backward: bool


class Choices:
    """The choices of what to save and what to recompute.

    Attributes:
        operators: the operators, each after those whose values it reads.
        values: the values.
    """

    def __init__(self, operators: Sequence[Operator], values: Sequence[SaveableValue]) -> None:
        self.operators, self.values = operators, values
        self._readers: list[list[int]] = [[] for _ in values]
        self._computed: list[list[int]] = [[] for _ in operators]
        for index, operator_ in enumerate(operators):
            for read in operator_.reads:
                self._readers[read].append(index)
        for index, value in enumerate(values):
            self._computed[value.operator].append(index)

    def saved(self, recomputed: Recomputed, among: Collection[int]) -> set[int]:
        """Returns which of some values are saved: those that are read, and are not recomputed."""
        return {
            i
            for i in among
            if self.values[i].operator not in recomputed
            and (self.values[i].in_backward or not recomputed.isdisjoint(self._readers[i]))
        }

    def touched(self, operators: Collection[int]) -> set[int]:
        """Returns the values that some operators read or compute: only these can change with them."""
        return {v for i in operators for v in (*self.operators[i].reads, *self._computed[i])}

    def all_recomputed(self) -> Recomputed:
        """Returns the operators that the backward needs if nothing is saved."""
        found: set[int] = set()
        pending = [value.operator for value in self.values if value.in_backward]
        while pending:
            index = pending.pop()
            if index not in found:
                found.add(index)
                pending += [self.values[i].operator for i in self.operators[index].reads]
        return frozenset(found)

    def nested(self) -> list[Recomputed]:
        """Returns sets of recomputed operators, each within the one before it, down to none.

        Each spares the operator, with those that only it needs, that takes most time for the bytes it adds. A
        later set never saves fewer bytes.
        """
        left, size = self.all_recomputed(), 0
        found = [(size, left)]
        steps = {i: self._step(i, left) for i in sorted(left)}
        while left:
            best = max(steps.values(), key=lambda step: step.worth)
            changed, left, size = self.touched(best.spared), left - best.spared, size + best.added
            while found[-1][0] > size:
                found.pop()
            found.append((size, left))
            steps = {
                i: step if changed.isdisjoint(self.touched(step.spared)) else self._step(i, left)
                for i, step in steps.items()
                if i in left
            }
        return [recomputed for _, recomputed in found]

    def _step(self, index: int, recomputed: Recomputed) -> _Step:
        """Returns what is spared if an operator's values are saved."""
        spared, pending = {index}, [index]
        while pending:
            for read in self.operators[pending.pop()].reads:
                producer = self.values[read].operator
                others = recomputed - spared
                if producer in others and not any(
                    self.values[v].in_backward or not others.isdisjoint(self._readers[v])
                    for v in self._computed[producer]
                ):
                    spared.add(producer)
                    pending.append(producer)
        touched = self.touched(spared)
        after, before = (self.saved(each, touched) for each in (recomputed - spared, recomputed))
        added = sum(self.values[i].size for i in after) - sum(self.values[i].size for i in before)
        time = sum(self.operators[i].time for i in spared)
        return _Step(spared, added, (added <= 0, Fraction(time, max(added, 1))))


class _Step(NamedTuple):
    """The operators that a choice spares, the bytes that it adds, and its worth: time for bytes."""

    spared: set[int]
    added: int
    worth: tuple[bool, Fraction]


@dataclass(frozen=True)
class Rung:
    """One step of a ladder.

    Attributes:
        added: the names of the values that are saved from here on.
        dropped: the names of those that no longer are, because no recomputed operator reads them.
        recompute: the nanoseconds of the operators that the backward recomputes.
    """

    added: tuple[str, ...]
    dropped: tuple[str, ...]
    recompute: int


@dataclass(frozen=True)
class Ladder:
    """The rungs of a stage.

    Attributes:
        rungs: the rungs. The first saves nothing, the last all that the backward reads.
    """

    rungs: tuple[Rung, ...]

    @classmethod
    def of(cls, joint: JointGraph) -> Ladder:
        """Returns the ladder of a joint graph, which the graph keeps."""
        found = joint.derived.get(cls)
        if found is None:
            # All processes of a collective have to recompute it, or none: they may not measure other times.
            measures = not any(map(is_collective, joint.module.graph.nodes))
            found = joint.derived[cls] = cls.for_times(joint, partial(nanoseconds, measures=measures))
        assert isinstance(found, Ladder)
        return found

    @classmethod
    def for_times(cls, joint: JointGraph, nanoseconds: Callable[[fx.Node], int]) -> Ladder:
        """Returns the ladder of a joint graph, given the time of each operator, which is positive."""
        choices, names = _choices(joint, nanoseconds)
        before, *others = choices.nested()
        rungs = [Rung((), (), sum(choices.operators[i].time for i in before))]
        for recomputed in others:
            spared = before - recomputed
            touched = choices.touched(spared)
            old, new = choices.saved(before, touched), choices.saved(recomputed, touched)
            added, dropped = (tuple(names[i] for i in sorted(part)) for part in (new - old, old - new))
            time = rungs[-1].recompute - sum(choices.operators[i].time for i in spared)
            rungs.append(Rung(added, dropped, time))
            before = recomputed
        return cls(tuple(rungs))

    def furthest(self, sizes: Callable[[str], Any], share: float) -> tuple[int, set[str]]:
        """Returns the furthest rung within a share of the last rung's bytes, and the values that it saves.

        Args:
            sizes: returns the bytes of a value; they may be formulas, which record the comparisons.
            share: the share.
        """
        # The number that is meant: 0.6 is 3 / 5, and not slightly less.
        numerator, denominator = Fraction(share).limit_denominator(10**9).as_integer_ratio()
        steps = [sum(map(sizes, rung.added)) - sum(map(sizes, rung.dropped)) for rung in self.rungs]
        limit = sum(steps) * numerator
        saved: set[str] = set()
        total: Any = 0
        for index, (rung, step) in enumerate(zip(self.rungs, steps, strict=True)):
            total = total + step
            if not total * denominator <= limit:
                return index - 1, saved
            saved = (saved | {*rung.added}) - {*rung.dropped}
        return len(self.rungs) - 1, saved


def read_by_backward(joint: JointGraph) -> set[fx.Node]:
    """Returns the forward nodes that the backward reads, behind any views of them; no dequantized weights."""
    nodes = [n for n in joint.module.graph.nodes if n.op == "call_function"]
    read = {a for n in nodes if is_backward(n) for a in n.all_input_nodes if not is_backward(a)}
    return {source_of(n).base for n in read} - dequantized(joint)


def is_backward(node: fx.Node) -> bool:
    """Returns whether a node of a joint graph belongs to the backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def bytes_of(value: AnyTensor) -> int:
    """Returns the bytes of a value, which may be a formula."""
    return value.numel() * value.element_size()


def _choices(joint: JointGraph, nanoseconds: Callable[[fx.Node], int]) -> tuple[Choices, list[str]]:
    """Returns the choices of a joint graph, and the names of the values.

    Views cost nothing, and stand for what they view; so does what is kept anyway, such as parameters. Weights
    are dequantized again in any case.
    """
    again = dequantized(joint)
    forward = [n for n in joint.module.graph.nodes if n.op == "call_function" and not is_backward(n)]
    read = read_by_backward(joint)
    index_of: dict[fx.Node, int] = {}
    operators: dict[fx.Node, Operator] = {}
    position: dict[fx.Node, int] = {}
    values: list[SaveableValue] = []
    for node in forward:
        value = node.meta.get("val")
        if source_of(node).base is not node or not isinstance(value, AnyTensor) or node in again:
            continue
        producer = producer_of(node)
        if producer not in operators:
            bases = {source_of(a).base for a in producer.all_input_nodes}
            reads = frozenset(index_of[base] for base in bases if base in index_of)
            position[producer] = len(operators)
            operators[producer] = Operator(nanoseconds(producer), reads)
        index_of[node] = len(values)
        values.append(SaveableValue(bytes_of(value), position[producer], node in read))
    return Choices(list(operators.values()), values), [node.name for node in index_of]


def producer_of(node: fx.Node) -> fx.Node:
    """Returns the operator that computes a value: that of which it is one of several results."""
    while node.target is operator.getitem:
        producer = node.args[0]
        assert isinstance(producer, fx.Node)
        node = producer
    return node
