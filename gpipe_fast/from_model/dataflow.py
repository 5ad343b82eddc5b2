"""A call of a model as a list of calls: of its modules, and of the functions between them.

Each call has the values that it reads and those that it makes, by number; the call's inputs come first::

    model(input_ids=<0>, labels=<1>)
        calls[0]   <2> = transformer.wte(<0>)
        calls[1]   <3> = torch.arange(16, device=...)
        calls[2]   <4> = transformer.wpe(<3>)
        calls[3]   <5> = <2> + <4>
        ...

Numbers that follow from sizes of the inputs, the batch size and lengths, are expressions of symbols: a size
of 4 in a capture of 4 samples may be the batch size, or a 4 that the model has by chance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped, unused-ignore]
import torch
from torch import Tensor, nn

from gpipe_fast.torch_private import pytree
from gpipe_fast.torch_private.fake_tensors import python_of


class CannotCut(RuntimeError):
    """Raised where a model cannot be cut into layers. The message says what stands in the way."""


@dataclass(frozen=True)
class Ref:
    """The value with this number."""

    index: int


@dataclass(frozen=True)
class Owned:
    """A parameter, a buffer or another tensor that a module has as an attribute.

    Attributes:
        owner: the module.
        name: the attribute's name.
    """

    owner: nn.Module
    name: str

    def __hash__(self) -> int:
        return hash((id(self.owner), self.name))

    def read(self) -> Tensor:
        """Returns the present tensor."""
        found: Tensor = getattr(self.owner, self.name)
        return found


@dataclass(frozen=True)
class Slice:
    """A slice.

    Attributes:
        bounds: its start, stop and step, which are leaves, too.
    """

    bounds: tuple[Any, Any, Any]


class Device(NamedTuple):
    """The device of the stage that makes the call."""


class Place(NamedTuple):
    """The line of the user's code that makes a call."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}"


@dataclass(frozen=True)
class Counted:
    """A size that depends on the elements of a tensor, as of ``x[mask]``.

    Attributes:
        place: where it comes from.
    """

    place: Place = field(compare=False)


class Surroundings(NamedTuple):
    """What surrounds a call of a function.

    Attributes:
        grad: whether gradients are enabled.
        autocast: the dtype of autocast on the values' device; None if it is off.
    """

    grad: bool
    autocast: torch.dtype | None


@dataclass(frozen=True)
class Nested:
    """A nested value: its leaves, which are values, constants or owned tensors, and their nesting."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    def parts(self) -> Iterator[Any]:
        """Returns the leaves, with the bounds of slices in their place."""
        return chain.from_iterable(x.bounds if isinstance(x, Slice) else (x,) for x in self.leaves)

    def refs(self) -> Iterator[int]:
        """Returns the numbers of the values in it."""
        return (part.index for part in self.parts() if isinstance(part, Ref))

    def map(self, part: Callable[[Any], Any]) -> Nested:
        """Returns it with each part replaced by a function's result."""
        leaves = (Slice(tuple(map(part, x.bounds))) if isinstance(x, Slice) else part(x) for x in self.leaves)
        return Nested(tuple(leaves), self.spec)

    def build(self, part: Callable[[Any], Any]) -> Any:
        """Returns the nested value, with each part replaced by a function's result."""
        leaves = [slice(*map(part, x.bounds)) if isinstance(x, Slice) else part(x) for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Call:
    """A call of a function or of a module.

    Attributes:
        target: the module, the function, or the name of a method of the first argument.
        arguments: its positional and keyword arguments.
        result: what it returned.
        draws: whether it draws random numbers.
        mutates: the numbers of the values that it changes in place.
        surroundings: the modes around it.
        place: where the user's code makes it.
        keeps_state: whether it is made even if its result is unused, as of a block or a module with buffers.
        tables: the dictionaries among its arguments to which it may write, by position or name, with their
            classes; the result is then what it returned, and what it wrote to each of them.
        sizes_are_likely: whether the shapes of its results were found for a few sizes of its arguments, so
            that they may be wrong for other sizes.
    """

    target: Any
    arguments: Nested
    result: Nested
    draws: bool
    mutates: tuple[int, ...]
    surroundings: Surroundings
    place: Place = field(compare=False)
    keeps_state: bool = False
    tables: tuple[tuple[Any, type], ...] = ()
    sizes_are_likely: bool = False

    @property
    def is_module(self) -> bool:
        """Whether the target is a module."""
        return isinstance(self.target, nn.Module)

    def map(self, part: Callable[[Any], Any]) -> Call:
        """Returns the call, with each part of its arguments and its result replaced by a function."""
        arguments, result = self.arguments.map(part), self.result.map(part)
        mutates = tuple(part(Ref(ref)).index for ref in self.mutates)
        return replace(self, arguments=arguments, result=result, mutates=mutates)


@dataclass(frozen=True)
class RecordedTensor:
    """A tensor that a call reads or makes.

    Attributes:
        shape: its shape: integers, `Size` where they follow from sizes of the inputs, and `Counted`.
        dtype: its dtype.
        requires_grad: whether a gradient reaches it.
        storage: a number that tensors with the same memory share.
    """

    shape: tuple[Any, ...]
    dtype: torch.dtype
    requires_grad: bool
    storage: int


@dataclass(frozen=True)
class Decision:
    """A number that forward reads from a tensor, and by which it decides what to do.

    Attributes:
        target: the name of the method that returned it, as ``item``.
        arguments: its arguments.
        answer: the number.
        position: how many calls come before it.
        place: where the user's code reads it.
    """

    target: Any
    arguments: Nested
    answer: Any
    position: int
    place: Place = field(compare=False)


@dataclass(frozen=True)
class Dataflow:
    """A call of a model.

    Attributes:
        num_inputs: how many values are the call's input tensors.
        values: all values.
        calls: all calls, in order.
        result: what the model returned.
        decisions: what it read from its input tensors.
        surroundings: the modes around the call of the model.
        conditions: the conditions on the sizes of the inputs under which it holds.
    """

    num_inputs: int
    values: tuple[RecordedTensor, ...]
    calls: tuple[Call, ...]
    result: Nested
    decisions: tuple[Decision, ...]
    surroundings: Surroundings
    conditions: tuple[Any, ...] = ()

    def producers(self) -> dict[int, int]:
        """Returns, for each value that is no input, the index of the call that makes it."""
        found: dict[int, int] = {}
        for index, call in enumerate(self.calls):
            for ref in call.result.refs():
                if ref >= self.num_inputs:
                    found.setdefault(ref, index)
        return found

    def behind(
        self, refs: Iterable[int], stops: Callable[[int, Call], bool] = lambda ref, call: False
    ) -> Iterator[tuple[int, Call | None]]:
        """Returns the values that values follow from, and these.

        Args:
            refs: the numbers of the values.
            stops: whether not to go on behind a value that a call makes.

        Returns:
            The numbers, each with the call that makes it, or None for an input.
        """
        producers, wanted, seen = self.producers(), list(refs), set[int]()
        while wanted:
            ref = wanted.pop()
            if ref in seen:
                continue
            seen.add(ref)
            call = self.calls[producers[ref]] if ref in producers else None
            yield ref, call
            if call is not None and not stops(ref, call):
                wanted += call.arguments.refs()

    def calls_for(
        self,
        refs: Iterable[int],
        known: Container[int] = (),
        stops: Callable[[Call], bool] = lambda call: False,
    ) -> list[int]:
        """Returns the indices of the calls that compute values, in order, with those that change their parts.

        Args:
            refs: the numbers of the values.
            known: the numbers of values that are not computed.
            stops: whether not to make a call.
        """
        producers, wanted, found = self.producers(), list(refs), set[int]()
        while wanted:
            ref = wanted.pop()
            index = None if ref in known else producers.get(ref)
            if index is None or index in found or stops(self.calls[index]):
                continue
            found.add(index)
            arguments = [x for x in self.calls[index].arguments.refs() if x not in known]
            wanted += arguments
            storages = {self.values[x].storage for x in (*arguments, *self.calls[index].result.refs())}
            for later, other in enumerate(self.calls):
                if later not in found and any(self.values[x].storage in storages for x in other.mutates):
                    found.add(later)
                    wanted += other.arguments.refs()
        return sorted(found)

    def depends_on(self, refs: Iterable[int], inputs: Container[int]) -> bool:
        """Returns whether values depend on one of some inputs, or on random numbers."""
        return any(ref in inputs or (call is not None and call.draws) for ref, call in self.behind(refs))

    def _may_change(self, arguments: Nested) -> bool:
        """Returns whether an input, or a tensor of a module, affects arguments."""
        calls = [call for _, call in self.behind(arguments.refs())]
        nested = [arguments, *(call.arguments for call in calls if call is not None)]
        return None in calls or any(isinstance(leaf, Owned) for each in nested for leaf in each.leaves)

    def pruned(self) -> Dataflow:
        """Returns the record without what has no effect: decisions that are always equal, and unused calls.

        Calls that draw random numbers, that have buffers or that are blocks have an effect.
        """
        inputs = range(self.num_inputs)
        guards = [d for d in self.decisions if self._may_change(d.arguments)]
        live = {*inputs, *self.result.refs(), *(ref for d in guards for ref in d.arguments.refs())}
        storages = {self.values[ref].storage for ref in live}
        calls: list[Call] = []
        kept: list[int] = []
        for index, call in reversed([*enumerate(self.calls)]):
            results = set(call.result.refs())
            if (
                results & live
                or call.draws
                or call.keeps_state
                or any(self.values[ref].storage in storages for ref in call.mutates)
            ):
                calls.append(call)
                kept.append(index)
                live |= {*call.arguments.refs(), *results}
                storages |= {self.values[ref].storage for ref in (*call.arguments.refs(), *results)}
        guards = [replace(d, position=sum(index < d.position for index in kept)) for d in guards]
        return self.renumbered(calls[::-1], guards, sorted(live))

    def renumbered(self, calls: Sequence[Call], guards: Sequence[Decision], live: Sequence[int]) -> Dataflow:
        """Returns other calls and decisions, with new numbers for values.

        Args:
            calls: the calls.
            guards: the decisions.
            live: the numbers of all values in them, in the new order.
        """
        numbers = {old: new for new, old in enumerate(live)}
        storages: dict[int, int] = {}

        def part(value: Any) -> Any:
            return Ref(numbers[value.index]) if isinstance(value, Ref) else value

        return Dataflow(
            self.num_inputs,
            tuple(
                replace(
                    self.values[ref], storage=storages.setdefault(self.values[ref].storage, len(storages))
                )
                for ref in live
            ),
            tuple(call.map(part) for call in calls),
            self.result.map(part),
            tuple(replace(each, arguments=each.arguments.map(part)) for each in guards),
            self.surroundings,
            self.conditions,
        )

    def at(self, leaf: Callable[[Any], Any]) -> Dataflow:
        """Returns it with each leaf, and each size of a shape, replaced by a function's result."""
        return replace(
            self,
            values=tuple(replace(each, shape=tuple(map(leaf, each.shape))) for each in self.values),
            calls=tuple(call.map(leaf) for call in self.calls),
            result=self.result.map(leaf),
            decisions=tuple(replace(each, arguments=each.arguments.map(leaf)) for each in self.decisions),
            conditions=(),
        )


class Differs(Exception):
    """Raised where forward does something else for other sizes. The message says what."""


@functools.cache
def symbol_of(index: int) -> sympy.Symbol:
    """Returns the symbol of a size: ``B`` for the batch size, with index 0; then ``L1`` and so on."""
    return sympy.Symbol(f"L{index}" if index else "B", positive=True, integer=True)


def _values(sizes: Sequence[int] | Mapping[int, int]) -> dict[sympy.Symbol, sympy.Integer]:
    items = sizes.items() if isinstance(sizes, Mapping) else enumerate(sizes)
    return {symbol_of(index): sympy.Integer(size) for index, size in items}


def hold(conditions: Sequence[sympy.Basic], sizes: Sequence[int]) -> bool:
    """Returns whether conditions on the sizes of inputs hold for these sizes."""
    values = _values(sizes)
    return all(each.xreplace(values) == sympy.true for each in conditions)


@dataclass(frozen=True)
class Size:
    """A number that depends on sizes of the inputs.

    Attributes:
        expression: the number, in the symbols of the sizes.
    """

    expression: sympy.Expr

    def at(self, sizes: Sequence[int] | Mapping[int, int]) -> Any:
        """Returns the number for these sizes, the batch size first; for some of them, by index, a `Size`."""
        found = self.expression.xreplace(_values(sizes))
        if found.free_symbols:
            return Size(found)
        return int(found) if found.is_integer else float(found)

    def __str__(self) -> str:
        """Returns the number as a formula, with ``B`` for the batch size and ``L1`` for the first length."""
        return str(self.expression)

    def code(self, names: Mapping[int, str]) -> str:
        """Returns a Python expression, given the names of the variables that have the sizes."""
        symbols = {symbol_of(index): sympy.Symbol(name, integer=True) for index, name in names.items()}
        return python_of(self.expression.xreplace(symbols))

    def sizes(self) -> list[int]:
        """Returns the indices of the sizes on which it depends."""
        names = {str(symbol) for symbol in self.expression.free_symbols}
        return sorted(int(name[1:] or 0) for name in names)


def at_sizes(leaf: Any, sizes: Sequence[int] | Mapping[int, int]) -> Any:
    """Returns a leaf with numbers for these sizes."""
    return leaf.at(sizes) if isinstance(leaf, Size) else leaf


def batch_dims(value: RecordedTensor) -> list[int]:
    """Returns the dimensions of a value whose size follows the batch size, the first of all sizes."""
    return [dim for dim, size in enumerate(value.shape) if isinstance(size, Size) and 0 in size.sizes()]
