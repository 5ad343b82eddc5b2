"""Which numbers of a record depend on the batch size: found by comparing records of several batch sizes.

A number that is 4 in a record of 4 samples may be the batch size, or a 4 that the model has by chance. In a
record of 11 samples, the batch size is 11, and the other number is still 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from gpipe_fast.from_model.dataflow import Call, Dataflow, Decision, Nested, RecordedTensor, Slice


class Number(NamedTuple):
    """A number that depends on sizes of the inputs: the batch size B, and lengths L.

    Attributes:
        constant: the part that does not depend on them.
        factors: the factor of each of them: of B, then of each L.
        products: the factor of ``B * L``, for each L.
    """

    constant: int
    factors: tuple[int, ...]
    products: tuple[int, ...]

    def at(self, sizes: Sequence[int]) -> int:
        """Returns the number for these sizes."""
        batch, lengths = sizes[:1], sizes[1:]
        single = sum(factor * size for factor, size in zip(self.factors, sizes, strict=True))
        pairs = sum(f * size * batch[0] for f, size in zip(self.products, lengths, strict=True))
        return self.constant + single + pairs

    def __str__(self) -> str:
        """Returns the number as a sum, with ``B`` for the batch size and ``L1`` for the first length."""
        names = ["B", *(f"L{i}" for i in range(1, len(self.factors)))]
        terms = [
            "*".join([str(factor)] * (factor != 1) + [names[size] for size in sizes])
            for sizes, factor in self.terms().items()
        ]
        return " + ".join([*terms, str(self.constant)] if self.constant or not terms else terms)

    @property
    def is_batch(self) -> bool:
        """Whether it is the batch size."""
        return self.terms() == {(0,): 1} and not self.constant

    @property
    def follows_batch(self) -> bool:
        """Whether it depends on the batch size."""
        return bool(self.factors[0] or any(self.products))

    def terms(self) -> dict[tuple[int, ...], int]:
        """Returns the factors that are not 0, by the sizes that are multiplied by them."""
        single = {(index,): factor for index, factor in enumerate(self.factors)}
        pairs = {(0, index + 1): factor for index, factor in enumerate(self.products)}
        return {sizes: factor for sizes, factor in (single | pairs).items() if factor}


class Differs(Exception):
    """Raised where records differ by more than numbers that follow the sizes. The message says where."""


def _unused_primes(taken: Collection[int], count: int) -> list[int]:
    primes = (n for n in range(11, 10_000) if all(n % d for d in range(2, int(n**0.5) + 1)))
    return [next(n for n in primes if n not in taken) for _ in range(count)]


def unify(flows: Sequence[Dataflow], sizes: Sequence[tuple[int, ...]]) -> Dataflow:
    """Returns one record for all sizes, in which numbers that follow them are `Number`.

    Args:
        flows: records of the same call with inputs of other sizes, which `probes_for` returns.
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

    def value(self, values: tuple[RecordedTensor, ...]) -> RecordedTensor:
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
        base, count = self._sizes[0], len(self._sizes[0])
        single = [(self._sizes[1 + i][i] - base[i]) for i in range(count)]
        products = []
        for i in range(1, count):
            mixed = numbers[count + i] - numbers[1] - numbers[1 + i] + numbers[0]
            products.append(_divided(mixed, single[0] * single[i], where))
        factors = [_divided(numbers[1 + i] - numbers[0], single[i], where) for i in range(count)]
        for i, product in enumerate(products, 1):
            factors[0] -= product * base[i]
            factors[i] -= product * base[0]
        found = Number(0, tuple(factors), tuple(products))
        found = found._replace(constant=numbers[0] - found.at(base))
        if any(found.at(at) != number for at, number in zip(self._sizes, numbers, strict=True)):
            raise Differs(f"passes a number that does not follow the sizes of the inputs in {where}")
        return found


def _divided(number: int, by: int, where: str) -> int:
    factor, rest = divmod(number, by)
    if rest:
        raise Differs(f"passes a number that is no multiple of a size of the inputs in {where}")
    return factor


def probes_for(own: tuple[int, ...], taken: Collection[int]) -> list[tuple[int, ...]]:
    """Returns the sizes of further records: one size differs in each, then B and one L, then all.

    Args:
        own: the sizes of the first record: B, and each L.
        taken: sizes to avoid, because a number may have them by chance.
    """
    other = _unused_primes(taken, 2 * len(own))
    singly = [(*own[:i], other[i], *own[i + 1 :]) for i in range(len(own))]
    pairs = [(other[0], *own[1:i], other[i], *own[i + 1 :]) for i in range(1, len(own))]
    return [*singly, *pairs, tuple(other[len(own) :])]


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


def batch_dims(value: RecordedTensor) -> list[int]:
    """Returns the dimensions of a value whose size follows the batch size, the first of all sizes."""
    return [dim for dim, size in enumerate(value.shape) if isinstance(size, Number) and size.follows_batch]
