"""Which numbers of a record depend on the batch size: found by comparing records of several batch sizes.

A number that is 4 in a record of 4 samples may be the batch size, or a 4 that the model has by chance. In a
record of 11 samples, the batch size is 11, and the other number is still 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from gpipe_fast.from_model.dataflow import Call, Dataflow, Decision, Nested, Slice, Value


class Number(NamedTuple):
    """A number that depends on sizes of the inputs: ``constant + sum(factor * size)``.

    Attributes:
        constant: the part that does not depend on them.
        factors: the factor of each size.
    """

    constant: int
    factors: tuple[int, ...]

    def at(self, sizes: Sequence[int]) -> int:
        """Returns the number for these sizes."""
        return self.constant + sum(f * size for f, size in zip(self.factors, sizes, strict=True))


class Differs(Exception):
    """Raised where records differ by more than numbers that follow the sizes. The message says where."""


def probe_sizes(taken: Collection[int], count: int) -> list[int]:
    """Returns small sizes that no tensor has: primes from 11 on."""
    primes = (n for n in range(11, 10_000) if all(n % d for d in range(2, int(n**0.5) + 1)))
    return [next(n for n in primes if n not in taken) for _ in range(count)]


def unify(flows: Sequence[Dataflow], sizes: Sequence[tuple[int, ...]]) -> Dataflow:
    """Returns one record for all sizes, in which numbers that follow them are `Number`.

    Args:
        flows: records of the same call with inputs of other sizes. Size j differs from the first record's in
            record j + 1 alone; further records confirm what these show.
        sizes: the sizes in each record.

    Raises:
        Differs: the records differ otherwise.
    """
    fit = _Fit(sizes)
    first = flows[0]
    counts = {len(flow.calls) for flow in flows}
    for calls in zip(*(flow.calls for flow in flows), strict=False):
        if len({id(call.target) for call in calls}) > 1 and any(c.target != calls[0].target for c in calls):
            raise Differs(f"calls another function at {calls[0].place}")
    if len(counts) > 1:
        shortest = min(flows, key=lambda flow: len(flow.calls))
        longest = max(flows, key=lambda flow: len(flow.calls))
        raise Differs(f"makes another number of calls from {longest.calls[len(shortest.calls)].place} on")
    calls = tuple(fit.call(each) for each in zip(*(flow.calls for flow in flows), strict=True))
    values = tuple(fit.value(each) for each in zip(*(flow.values for flow in flows), strict=True))
    result = fit.nested([flow.result for flow in flows], "what forward returns")
    decisions = tuple(fit.decision(each) for each in zip(*(f.decisions for f in flows), strict=True))
    return dataclasses.replace(first, calls=calls, values=values, result=result, decisions=decisions)


class _Fit:
    def __init__(self, sizes: Sequence[tuple[int, ...]]) -> None:
        self._sizes = sizes

    def call(self, calls: tuple[Call, ...]) -> Call:
        where = f"a call at {calls[0].place}"
        first = calls[0]
        same = {(call.draws, call.mutates, call.surroundings) for call in calls}
        if len(same) > 1:
            raise Differs(f"runs {where} otherwise")
        arguments = self.nested([call.arguments for call in calls], where)
        result = self.nested([call.result for call in calls], where)
        return dataclasses.replace(first, arguments=arguments, result=result)

    def decision(self, decisions: tuple[Decision, ...]) -> Decision:
        where = f"a branch at {decisions[0].place}"
        arguments = self.nested([each.arguments for each in decisions], where)
        return dataclasses.replace(decisions[0], arguments=arguments)

    def value(self, values: tuple[Value, ...]) -> Value:
        first = values[0]
        if len({(len(v.shape), v.dtype, v.requires_grad) for v in values}) > 1:
            raise Differs(f"makes tensors of other kinds ({first.dtype}, {list(first.shape)})")
        shape = tuple(self.leaf(sizes, "a shape") for sizes in zip(*(v.shape for v in values), strict=True))
        return dataclasses.replace(first, shape=shape)

    def nested(self, nested: Sequence[Nested], where: str) -> Nested:
        if any(each.spec != nested[0].spec for each in nested):
            raise Differs(f"nests values otherwise in {where}")
        columns = zip(*(each.leaves for each in nested), strict=True)
        return Nested(tuple(self.leaf(column, where) for column in columns), nested[0].spec)

    def leaf(self, leaves: Sequence[Any], where: str) -> Any:
        first = leaves[0]
        if any(type(leaf) is not type(first) for leaf in leaves):
            raise Differs(f"passes values of other types in {where}")
        if isinstance(first, Slice):
            bounds = zip(*((leaf.start, leaf.stop, leaf.step) for leaf in leaves), strict=True)
            return Slice(*(self.leaf(each, where) for each in bounds))
        if all(leaf is first or leaf == first or (leaf != leaf and first != first) for leaf in leaves):
            return first
        if type(first) is not int:
            raise Differs(f"passes {first!r} or {next(x for x in leaves if x != first)!r} in {where}")
        return self._number(leaves, where)

    def _number(self, numbers: Sequence[int], where: str) -> Number:
        base = self._sizes[0]
        factors = []
        for size, (own, other) in enumerate(zip(base, map(tuple, self._sizes[1:]), strict=False)):
            factor, rest = divmod(numbers[size + 1] - numbers[0], other[size] - own)
            if rest:
                raise Differs(f"passes a number that is no multiple of the batch size in {where}")
            factors.append(factor)
        constant = numbers[0] - sum(f * size for f, size in zip(factors, base, strict=True))
        found = Number(constant, tuple(factors))
        if any(found.at(at) != number for at, number in zip(self._sizes, numbers, strict=True)):
            raise Differs(f"passes a number that does not follow the batch size in {where}")
        return found


def at_sizes(leaf: Any, sizes: Sequence[int]) -> Any:
    """Returns a leaf with numbers for these sizes."""
    if isinstance(leaf, Number):
        return leaf.at(sizes)
    if isinstance(leaf, Slice):
        return Slice(*(at_sizes(each, sizes) for each in (leaf.start, leaf.stop, leaf.step)))
    return leaf


def numbers_in(leaves: Sequence[Any]) -> Iterator[Number]:
    """Returns the numbers among leaves."""
    for leaf in leaves:
        if isinstance(leaf, Number):
            yield leaf
        elif isinstance(leaf, Slice):
            yield from numbers_in((leaf.start, leaf.stop, leaf.step))


def batch_dims(value: Value) -> list[int]:
    """Returns the dimensions of a value whose size follows the batch size, the first of all sizes."""
    return [dim for dim, size in enumerate(value.shape) if isinstance(size, Number) and size.factors[0]]


def specialize(flow: Dataflow, sizes: Sequence[int]) -> Dataflow:
    """Returns the record for these sizes."""

    def nested(value: Nested) -> Nested:
        return Nested(tuple(at_sizes(leaf, sizes) for leaf in value.leaves), value.spec)

    def shape(value: Value) -> Value:
        return dataclasses.replace(value, shape=tuple(at_sizes(size, sizes) for size in value.shape))

    return dataclasses.replace(
        flow,
        values=tuple(map(shape, flow.values)),
        calls=tuple(
            dataclasses.replace(call, arguments=nested(call.arguments), result=nested(call.result))
            for call in flow.calls
        ),
        result=nested(flow.result),
        decisions=tuple(dataclasses.replace(d, arguments=nested(d.arguments)) for d in flow.decisions),
    )

