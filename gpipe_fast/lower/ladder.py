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
share never recomputes more. Between two rungs no choice is better for any price of time (`Choices`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

from torch import fx

from gpipe_fast.lower.alias import source_of
from gpipe_fast.lower.min_cut import Choices, Operator, SaveableValue
from gpipe_fast.lower.operator_times import nanoseconds
from gpipe_fast.trace.collectives import is_collective
from gpipe_fast.trace.joint_graph import JointGraph, dequantized
from gpipe_fast.trace.tensor_metadata import AnyTensor


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


__all__ = ["Ladder", "Rung", "bytes_of", "is_backward", "producer_of", "read_by_backward"]
