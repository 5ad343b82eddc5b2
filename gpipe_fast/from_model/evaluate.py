"""Computes values of a record from its inputs, such as those that a forward reads and decides by.

A layer computes them, in each call from the inputs of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from gpipe_fast.from_model.cut import Part
from gpipe_fast.from_model.dataflow import (
    Call,
    CannotCut,
    Dataflow,
    Differs,
    Nested,
    Owned,
    Place,
    RecordedTensor,
    Ref,
)
from gpipe_fast.from_model.layer import make_layer
from gpipe_fast.torch_private import pytree

# Returns values, given those that they are computed from.
Function = Callable[[Sequence[Any]], tuple[Any, ...]]
_ONE = pytree.tree_flatten(0)[1]


class Unknown(Exception):
    """Raised where a value cannot be computed. The message says what it depends on."""


def refuse_reading(owned: Owned) -> NoReturn:
    """Refuses to read a tensor of a module, which may be in another process.

    Raises:
        CannotCut: always.
    """
    raise CannotCut(
        f"what forward decides, or a loss is divided by, depends on {owned.name!r} of a "
        f"{type(owned.owner).__name__}, which with a mesh only the process of its stage has"
    )


def computes(
    flow: Dataflow,
    given: Sequence[int],
    wanted: Sequence[int],
    read: Callable[[Owned], Tensor] = Owned.read,
) -> Function:
    """Returns a function that computes values of a record from others.

    Args:
        flow: the record.
        given: the numbers of the values that the function gets.
        wanted: the numbers of those that it returns.
        read: returns a tensor that a module has as an attribute.

    Raises:
        Unknown: they depend on random numbers or on a module.
    """
    calls = [flow.calls[index] for index in flow.calls_for(wanted, set(given))]
    for call in calls:
        if call.draws:
            raise Unknown(f"random numbers, drawn at {call.place}")
        if call.is_module:
            raise Unknown(f"a {type(call.target).__name__}, called at {call.place}")
    layer, owned = make_layer(flow, Part(None, tuple(calls), tuple(given), tuple(wanted)), read=read)

    def compute(values: Sequence[Any]) -> tuple[Any, ...]:
        owned.take()
        found: tuple[Any, ...] = layer.forward(values)
        return found

    return compute


def _reads(
    flow: Dataflow, target: str, arguments: Nested, given: Sequence[int], read: Callable[[Owned], Tensor]
) -> Function:
    """Returns a function that calls a method of a tensor, as ``item``, with values that it computes.

    Raises:
        Unknown: as for `computes`.
    """
    found = len(flow.values)
    result = Nested((Ref(found),), _ONE)
    call = Call(target, arguments, result, False, (), flow.surroundings, Place("", 0, ""))
    values = *flow.values, RecordedTensor((), torch.bool, False, -1)
    return computes(replace(flow, values=values, calls=(*flow.calls, call)), given, [found], read)


def readers(flow: Dataflow, may_read: bool) -> list[Function]:
    """Returns what reads from the inputs of a call what forward decides by, for each decision.

    Args:
        flow: the capture.
        may_read: whether all tensors of modules are in this process.
    """
    read, inputs = _read_with_data if may_read else refuse_reading, range(flow.num_inputs)
    return [
        # Later calls may change what is read.
        _reads(replace(flow, calls=flow.calls[: each.position]), each.target, each.arguments, inputs, read)
        for each in flow.decisions
    ]


def decide_by(tensors: Sequence[Tensor], may_read: bool, opened: Container[nn.Module]) -> Any:
    """Returns a function that reads from tensors what forward reads from its inputs."""

    def decide(target: str, arguments: Nested, flow: Dataflow, own: Callable[[Owned], Tensor]) -> Any:
        def read(owned: Owned) -> Tensor:
            if owned.owner not in opened and owned.name in owned.owner._buffers:
                raise Unknown(f"{owned.name!r} of a {type(owned.owner).__name__}, which may change it")
            return with_data(own(owned)) if may_read else refuse_reading(owned)

        def answer(drawn: dict[int, Tensor]) -> Any:
            given = dict(enumerate(map(with_data, tensors))) | drawn
            return _reads(flow, target, arguments, list(given), read)([*given.values()])[0]

        with torch.no_grad():
            try:
                return answer({})
            except Unknown as unknown:
                draw = _compared_draw(flow, arguments)
                if draw is None:
                    raise
                reason = str(unknown)
            # As by layerdrop, which a rate of 0 decides whatever is drawn.
            dtype = flow.values[draw].dtype
            ends = [answer({draw: torch.full((), each, dtype=dtype)}) for each in (0.0, 1 - 2**-24)]
        if ends[0] != ends[1]:
            raise Unknown(reason)
        return ends[0]

    return decide


def _compared_draw(flow: Dataflow, arguments: Nested) -> int | None:
    """Returns the random number in [0, 1) whose comparison with a constant a value is, if it is one."""
    producers = flow.producers()

    def maker(leaves: Sequence[Any]) -> Call | None:
        refs = [leaf.index for leaf in leaves if isinstance(leaf, Ref)]
        owned = any(isinstance(leaf, Owned) for leaf in leaves)
        is_one = len(refs) == 1 and not owned and refs[0] in producers
        return flow.calls[producers[refs[0]]] if is_one else None

    comparison = maker(arguments.leaves)
    if comparison is None or getattr(comparison.target, "__name__", comparison.target) not in _COMPARISONS:
        return None
    draw = maker(comparison.arguments.leaves)
    if draw is None or draw.target is not torch.rand:
        return None
    (ref,) = draw.result.refs()
    return None if flow.values[ref].shape else ref


_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal"})


def repeated(answers: Sequence[Any]) -> Any:
    """Returns a function that repeats what forward has read before."""
    left = iter(answers)

    def decide(*_: Any) -> Any:
        try:
            return next(left)
        except StopIteration:
            raise Differs from None

    return decide


def _read_with_data(owned: Owned) -> Tensor:
    return with_data(owned.read())


def with_data(tensor: Tensor) -> Tensor:
    """Returns a tensor that has elements: ones in place of a meta tensor."""
    return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu") if tensor.is_meta else tensor
