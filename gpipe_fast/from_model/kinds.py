"""Kinds of calls of a model, and what its forward does in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpipe_fast.from_model.dataflow import Dataflow
from gpipe_fast.from_model.program import Program
from gpipe_fast.from_model.sizes import hold
from gpipe_fast.trace.layer_states import LayerState

# Dimensions of inputs that have the same size: the numbers of the inputs, and their dimensions.
Group = tuple[tuple[int, int], ...]


class Path:
    """What forward does in a state of the model, and for what it decides by sizes and elements.

    Attributes:
        flow: the calls that it makes.
        program: the program that makes them.
        state: the state of the model.
        fixed: the lengths that are numbers, 0 or 1, by their indices.
        answers: what forward has read from tensors.
        small: for micro-batches of 0 or 1 samples, the conditions on sizes.
    """

    def __init__(
        self,
        flow: Dataflow,
        program: Program,
        state: LayerState,
        fixed: Mapping[int, int],
        answers: Sequence[Any],
    ) -> None:
        self.flow, self.program, self.state = flow, program, state
        self.fixed, self.answers = fixed, answers
        self.small: dict[int, Sequence[Any]] = {}
        self._known: set[tuple[int, ...]] = set()

    def has_lengths(self, sizes: tuple[int, ...]) -> bool:
        """Returns whether lengths are 0 and 1 where they were in the capture, and larger elsewhere."""
        lengths = list(enumerate(sizes))[1:]
        return all(size == self.fixed[i] if i in self.fixed else size > 1 for i, size in lengths)

    def is_for(self, sizes: tuple[int, ...]) -> bool:
        """Returns whether forward does this for micro-batches of some sizes, as far as sizes decide."""
        if sizes not in self._known:
            conditions = self.flow.conditions if sizes[0] > 1 else self.small.get(sizes[0])
            if conditions is None or not self.has_lengths(sizes) or not hold(conditions, sizes):
                return False
            self._known.add(sizes)
        return True


class CallKind:
    """A kind of call: everything but sizes that are symbols, and the elements of tensors, is the same.

    Attributes:
        split: the inputs that are split into micro-batches, with their batch dimensions.
        lengths: the dimensions of inputs, other than the batch, whose sizes differ between calls; those in a
            group have the same size.
        shapes: the shapes of the inputs of the first call.
        paths: what forward does.
    """

    def __init__(
        self,
        split: Mapping[int, int],
        lengths: Sequence[Group],
        shapes: Sequence[Sequence[int]],
    ) -> None:
        self.split, self.lengths, self.shapes = split, tuple(lengths), shapes
        self.paths: list[Path] = []

    def symbols(self) -> dict[tuple[int, int], int]:
        """Returns the index of the size that a dimension follows, by the input and the dimension."""
        lengths = {dim: i for i, group in enumerate(self.lengths, 1) for dim in group}
        return dict.fromkeys(self.split.items(), 0) | lengths

    def includes(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Returns whether a call with inputs of these shapes is of this kind."""
        symbols, sizes = self.symbols(), dict[int, int]()
        for index, (own, other) in enumerate(zip(self.shapes, shapes, strict=True)):
            for dim, size in enumerate(other):
                symbol = symbols.get((index, dim))
                if size != (own[dim] if symbol is None else sizes.setdefault(symbol, size)):
                    return False
        return True
