"""Cuts a record into layers, one for each block.

The calls stay in order, so that random numbers and sums of gradients come in eager's order. A block's layer
begins after the block before it::

    layer 0        the calls before the first block
    layer 1        block 1
    layer 2        the calls after block 1, and block 2
    ...
    layer n + 1    the calls after block n

Values that later layers read are carried from layer to layer, in the order of their last use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from torch import nn

from gpipe_fast.from_model.dataflow import Call, CannotCut, Counted, Dataflow, Size, symbol_of


@dataclass(frozen=True)
class Part:
    """The calls of one layer.

    Attributes:
        block: the block; None in the first and in the last layer.
        calls: the calls, in order.
        given: the numbers of the values that the layer gets.
        returned: the numbers of the values that it returns.
    """

    block: nn.Module | None
    calls: tuple[Call, ...]
    given: tuple[int, ...]
    returned: tuple[int, ...]


def cut(flow: Dataflow, blocks: Sequence[nn.Module], wanted: Sequence[int]) -> list[Part]:
    """Cuts a record.

    Args:
        flow: the record.
        blocks: the blocks, in the order of their calls.
        wanted: the numbers of the values that the last layer returns.

    Raises:
        CannotCut: a tensor is changed in place in another layer than it, or an alias of it, is used.
    """
    layers = _pieces(flow, blocks)
    made_in = dict.fromkeys(range(flow.num_inputs), -1)
    for index, calls in enumerate(layers):
        for call in calls:
            for ref in call.result.refs():
                made_in.setdefault(ref, index)
    last_use = _last_uses(flow, layers, made_in, wanted)
    _check_in_place(flow, layers, made_in, last_use)
    _check_sizes(flow, made_in, last_use)
    order = sorted(last_use, key=lambda ref: (-last_use[ref], ref))
    carried = [
        tuple(ref for ref in order if made_in[ref] < index <= last_use[ref]) for index in range(len(layers))
    ]
    carried[0] = tuple(range(flow.num_inputs))
    return [
        Part(block, calls, given, returned)
        for block, calls, given, returned in zip(
            [None, *blocks, None], layers, carried, [*carried[1:], tuple(wanted)], strict=True
        )
    ]


def _pieces(flow: Dataflow, blocks: Sequence[nn.Module]) -> list[tuple[Call, ...]]:
    at = [i for i, call in enumerate(flow.calls) if call.is_module and call.target in blocks]
    assert [flow.calls[i].target for i in at] == list(blocks)
    bounds = [0, at[0], *(i + 1 for i in at), len(flow.calls)]
    return [flow.calls[begin:end] for begin, end in pairwise(bounds)]


def _last_uses(
    flow: Dataflow, layers: Sequence[Sequence[Call]], made_in: dict[int, int], wanted: Sequence[int]
) -> dict[int, int]:
    last: dict[int, int] = {}
    for index, calls in enumerate(layers):
        read = [ref for call in calls for ref in call.arguments.refs() if made_in[ref] < index]
        last.update((ref, index) for call in calls for ref in call.arguments.refs())
        for size in sizes_in(flow, calls):
            if size_source(flow, size, read) is None:
                source = size_source(flow, size, range(flow.num_inputs))
                assert source is not None  # sizes are those of inputs
                last[source[0]] = index
    last.update(dict.fromkeys(wanted, len(layers) - 1))
    return {ref: layer for ref, layer in last.items() if ref in made_in}


def sizes_in(flow: Dataflow, calls: Sequence[Call]) -> list[int]:
    """Returns the sizes that numbers among the arguments of calls follow, and likely sizes of results."""
    likely = [flow.values[ref].shape for call in calls if call.sizes_are_likely for ref in call.result.refs()]
    found = chain(*(call.arguments.parts() for call in calls), *likely)
    return sorted({size for number in found if isinstance(number, Size) for size in number.sizes()})


def size_source(flow: Dataflow, size: int, refs: Iterable[int]) -> tuple[int, int] | None:
    """Returns the first of some values that has a dimension of a size, and that dimension; or None."""
    for ref in refs:
        for dim, number in enumerate(flow.values[ref].shape):
            if number == Size(symbol_of(size)):
                return ref, dim
    return None


def _check_sizes(flow: Dataflow, made_in: dict[int, int], last_use: dict[int, int]) -> None:
    """Checks that no tensor whose size depends on elements passes from layer to layer, or is returned."""
    for ref, layer in last_use.items():
        counted = [size for size in flow.values[ref].shape if isinstance(size, Counted)]
        if counted and layer != made_in[ref]:
            raise CannotCut(
                f"a tensor has a size that depends on elements, at {counted[0].place}, and another layer "
                "uses it; compute with masks, or use it before the next block"
            )


def _check_in_place(
    flow: Dataflow, layers: Sequence[Sequence[Call]], made_in: dict[int, int], last_use: dict[int, int]
) -> None:
    """Checks that what is changed in place in a layer has no alias that another layer made."""
    for index, calls in enumerate(layers):
        for call in calls:
            for ref in call.mutates:
                storage = flow.values[ref].storage
                aliases = [r for r in made_in if r != ref and flow.values[r].storage == storage]
                if any(made_in[r] < index <= last_use.get(r, -1) for r in aliases):
                    shape = ", ".join(map(str, flow.values[ref].shape))
                    raise CannotCut(
                        f"a tensor of shape [{shape}] is changed in place at {call.place}, in "
                        "another layer than the one that made it and an alias of it; "
                        "copy it first, as by x = x + y in place of x += y"
                    )
