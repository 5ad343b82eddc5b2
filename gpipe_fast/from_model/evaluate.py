"""Computes values of a record from its inputs, such as those that a forward reads and decides by.

They are computed in each call from the inputs of each micro-batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from gpipe_fast.from_model.dataflow import (
    Call,
    CannotCut,
    Dataflow,
    Decision,
    Device,
    Differs,
    Nested,
    Owned,
    Ref,
    at_sizes,
)
from gpipe_fast.torch_private import pytree


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


class Evaluation:
    """Computes values, each once.

    Args:
        flow: the record.
        known: the values that are known, by number.
        sizes: the sizes that numbers of the record follow.
        device: the device of new tensors.
        draw: makes a random tensor; None if there must be none.
        read: returns a tensor that a module has as an attribute.
    """

    def __init__(
        self,
        flow: Dataflow,
        known: dict[int, Tensor],
        sizes: Sequence[int],
        device: torch.device,
        draw: Callable[[Call], Any] | None = None,
        read: Callable[[Owned], Tensor] = Owned.read,
    ) -> None:
        self._flow, self._sizes, self._device = flow, sizes, device
        self._values: dict[int, Any] = dict(known)
        self._draw, self._read = draw, read
        self._producers = flow.producers()
        self._done: set[int] = set()

    def value(self, ref: int) -> Tensor:
        """Returns a value.

        Raises:
            Unknown: it depends on an unknown value, on random numbers or on a module.
        """
        if ref not in self._values:
            if ref not in self._producers:
                raise Unknown("an input")
            for index in self._calls_of(ref):
                if index not in self._done:
                    self._done.add(index)
                    self._run(self._flow.calls[index])
        found: Tensor = self._values[ref]
        return found

    def _calls_of(self, ref: int) -> list[int]:
        """Returns the calls to make for a value, in order, with those that change its parts in place."""
        wanted, calls = [ref], set[int]()
        while wanted:
            index = self._producers.get(wanted.pop())
            if index is None or index in calls:
                continue
            call = self._flow.calls[index]
            calls.add(index)
            wanted += [r for r in call.arguments.refs() if r not in self._values]
            storages = {self._flow.values[r].storage for r in call.result.refs()}
            for later, other in enumerate(self._flow.calls):
                if any(self._flow.values[r].storage in storages for r in other.mutates):
                    calls.add(later)
                    wanted += [r for r in other.arguments.refs() if r not in self._values]
        return sorted(calls)

    def _run(self, call: Call) -> None:
        if call.draws and self._draw is None:
            raise Unknown(f"random numbers, drawn at {call.place}")
        if call.is_module:
            raise Unknown(f"a {type(call.target).__name__}, called at {call.place}")
        autocast = call.surroundings.autocast
        with (
            torch.set_grad_enabled(call.surroundings.grad),
            torch.autocast(self._device.type, dtype=autocast, enabled=autocast is not None)
            if autocast is not None or torch.is_autocast_enabled(self._device.type)
            else contextlib.nullcontext(),
        ):
            returned = (
                self._draw(call) if call.draws and self._draw else self.call(call.target, call.arguments)
            )
        leaves = pytree.tree_leaves(returned)
        for leaf, value in zip(call.result.leaves, leaves, strict=True):
            if isinstance(leaf, Ref):
                self._values[leaf.index] = value

    def call(self, target: Any, arguments: Nested) -> Any:
        """Calls a function with the values of its arguments.

        Raises:
            Unknown: as for `value`.
        """
        args, kwargs = arguments.build(self._leaf)
        return target(*args, **kwargs)

    def _leaf(self, leaf: Any) -> Any:
        leaf = at_sizes(leaf, self._sizes)
        if isinstance(leaf, Ref):
            return self.value(leaf.index)
        if isinstance(leaf, Owned):
            return self._read(leaf)
        return self._device if isinstance(leaf, Device) else leaf


def decides_alike(
    flow: Dataflow,
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    device: torch.device,
    may_read: bool,
) -> bool:
    """Returns whether forward decides by the elements of tensors as it did in a capture.

    Args:
        flow: the capture.
        tensors: the input tensors of a micro-batch.
        sizes: its sizes.
        device: the device of the computation.
        may_read: whether all tensors of modules are in this process.
    """
    read = _read_with_data if may_read else refuse_reading

    def holds(decision: Decision) -> bool:
        # Later calls may change what was read.
        before = dataclasses.replace(flow, calls=flow.calls[: decision.position])
        evaluation = Evaluation(before, known_inputs(tensors), sizes, device, read=read)
        return bool(evaluation.call(decision.target, decision.arguments) == decision.answer)

    with torch.no_grad():
        return all(map(holds, flow.decisions))


def decide_by(
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    device: torch.device,
    may_read: bool,
    opened: Container[nn.Module],
) -> Any:
    """Returns a function that reads from tensors what forward reads from its inputs."""

    def decide(target: Any, arguments: Nested, flow: Dataflow, own: Callable[[Owned], Tensor]) -> Any:
        known = known_inputs(tensors)

        def answer(draw: Any) -> Any:
            def read(owned: Owned) -> Tensor:
                if owned.owner not in opened and owned.name in owned.owner._buffers:
                    raise Unknown(f"{owned.name!r} of a {type(owned.owner).__name__}, which may change it")
                return _with_data(own(owned)) if may_read else refuse_reading(owned)

            evaluation = Evaluation(flow, known, sizes, device, draw=draw, read=read)
            return evaluation.call(target, arguments)

        with torch.no_grad():
            try:
                return answer(None)
            except Unknown as unknown:
                reason = unknown
            extremes: list[Any] = []
            if _is_compared_draw(flow, arguments):  # as by layerdrop
                extremes = [answer(_constant_draw(flow, number)) for number in (0.0, 1 - 2**-24)]
        if len(extremes) == 2 and extremes[0] == extremes[1]:
            return extremes[0]
        raise Unknown(str(reason))

    return decide


def _is_compared_draw(flow: Dataflow, arguments: Nested) -> bool:
    """Returns whether a value is one random number in [0, 1) that is compared with a constant."""
    producers = flow.producers()

    def maker(leaves: Sequence[Any]) -> Any:
        refs = [leaf.index for leaf in leaves if isinstance(leaf, Ref)]
        owned = any(isinstance(leaf, Owned) for leaf in leaves)
        return (
            flow.calls[producers[refs[0]]] if len(refs) == 1 and not owned and refs[0] in producers else None
        )

    comparison = maker(arguments.leaves)
    if comparison is None or getattr(comparison.target, "__name__", "").strip("_") not in _COMPARISONS:
        return False
    draw = maker(comparison.arguments.leaves)
    return (
        draw is not None and draw.target is torch.rand and not flow.values[draw.result.leaves[0].index].shape
    )


_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal"})


def _constant_draw(flow: Dataflow, number: float) -> Any:
    def draw(call: Any) -> Tensor:
        if call.target is not torch.rand:
            raise Unknown("random numbers")
        value = flow.values[next(call.result.refs())]
        return torch.full(value.shape, number, dtype=value.dtype, device="cpu")

    return draw


def repeated(answers: Sequence[Any]) -> Any:
    """Returns a function that repeats what forward has read before."""
    left = iter(answers)

    def decide(*_: Any) -> Any:
        try:
            return next(left)
        except StopIteration:
            raise Differs from None

    return decide


def known_inputs(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """Returns the inputs of a call by their numbers, with elements."""
    return dict(enumerate(map(_with_data, tensors)))


def _read_with_data(owned: Owned) -> Tensor:
    return _with_data(owned.read())


def _with_data(tensor: Tensor) -> Tensor:
    """Returns a tensor that has elements: ones in place of a meta tensor."""
    return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu") if tensor.is_meta else tensor
