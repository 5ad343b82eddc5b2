"""Computes single values of a record from its inputs, such as the targets of a loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from gpipe_fast.from_model.dataflow import Call, CannotCut, Dataflow, Device, Nested, Owned, Ref, Slice
from gpipe_fast.from_model.sizes import at_sizes
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
        if isinstance(leaf, Device):
            return self._device
        if isinstance(leaf, Slice):
            return slice(*(self._leaf(each) for each in (leaf.start, leaf.stop, leaf.step)))
        return leaf
