"""The Python state of layers, as far as their graphs depend on it: a cache key that guards make.

A layer's description says what it consists of: classes, tensors and their metadata, training mode. It does
not say what the layer's attributes are, because only the layer's forward knows which it reads. So every
description has a list of states, each with the guards of all captures that were made in this state::

    description of Block      state 0: guards (layer.scale == 2, F.gelu is ...)
                              state 1: guards (layer.scale == 3, F.gelu is ...)

A layer is in the first state whose guards hold for it; if none holds, it is in a new state, without guards.
Equal layers are therefore in one state, and share all graphs, unless a guard tells them apart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from gpipe_fast._extension import Snapshot
from gpipe_fast.devices import kind_of
from gpipe_fast.layers.batchnorm import deferred_momentum
from gpipe_fast.layers.quantized import owners_of, parts_of
from gpipe_fast.layers.sharded import is_sharded, local_tensor
from gpipe_fast.strides import bits_of
from gpipe_fast.trace.dynamo import Captured, Refused, asks_for_device
from gpipe_fast.trace.unguarded import IMMUTABLE, Conditions, scope_of

# The maximum number of states of layers with the same description, and of descriptions for each layer: in
# train and eval mode, under autocast, on other devices.
_MAX_STATES = 64
_MAX_DESCRIPTIONS = 32
# The maximum number of states of a layer whose graphs contain tensors: caches keep these tensors.
_MAX_STATES_WITH_CONSTANTS = 16
# The maximum number of captures that a state keeps. Their guards stay.
_MAX_CAPTURES = 2


class LayerState:
    """A state of a layer; compared by identity.

    Attributes:
        captures: the latest captures in this state, by the arguments' key.
        has_constants: whether graphs contain tensors beside arguments, parameters and buffers.
        conditions: those of all captures, without those that say nothing new. They are only ever added to.
    """

    def __init__(self, states: LayerStates) -> None:
        self.captures: dict[Hashable, Captured] = {}
        self.conditions: list[Conditions] = []
        self.has_constants = False
        self._states = states

    def reuse(self, key: Hashable) -> Captured | None:
        """Returns the capture for the arguments' key, or None. Raises the version."""
        found = self.captures.get(key)
        if found is not None:
            self._states.version += 1  # another layer, or this layer again, turns out to be in this state
        return found

    def add(self, layer: nn.Module, key: Hashable, captured: Captured) -> None:
        """Adds a capture that was made from a layer in this state, and its guards.

        Raises:
            Refused: too many tensors took the place of another that is neither parameter nor buffer.
        """
        if captured.constants:
            self._states.count_constants(layer, self)
            self.has_constants = True
        while len(self.captures) >= _MAX_CAPTURES:
            del self.captures[next(iter(self.captures))]
        self.captures[key] = captured
        guards = captured.guards
        if captured.constants or not any(guards.follows_from(known.guards) for known in self.conditions):
            self._states.version += 1
            self.conditions.append(Conditions(guards, layer, captured.constants))

    def holds(self, layer: nn.Module) -> bool:
        """Returns whether a layer is in this state."""
        return self.surroundings_hold() and self.holds_for(layer)

    def surroundings_hold(self, count: int | None = None) -> bool:
        """Returns whether what is outside of layers is as in this state, by its first conditions."""
        for each in self.conditions[:count]:  # noqa: SIM110, each call runs it
            if not each.surroundings_hold():
                return False
        return True

    def holds_for(self, layer: nn.Module, count: int | None = None, same_attributes: bool = False) -> bool:
        """Returns whether a layer itself is in this state, by its first conditions or by all.

        Args:
            layer: the layer.
            count: the number of the conditions; None for all.
            same_attributes: whether it was in this state, and its modules have the same attributes since.
        """
        scope = scope_of(layer)
        for each in self.conditions[:count]:  # noqa: SIM110
            if not each.hold_for(scope, same_attributes):
                return False
        return True


class LayerStates:
    """The states of layers, by description and by the modes of a call.

    Attributes:
        version: changes whenever a guard is added, and when a layer turns out to be in a known state.
    """

    def __init__(self) -> None:
        self.version = 0
        self._with_constants: WeakKeyDictionary[nn.Module, WeakSet[LayerState]] = WeakKeyDictionary()
        # The least recently used first.
        self._states: OrderedDict[Hashable, list[LayerState]] = OrderedDict()
        self._most_layers = 1

    def count_constants(self, layer: nn.Module, state: LayerState) -> None:
        """Counts a state of a layer whose graphs contain tensors.

        Raises:
            Refused: there are too many.
        """
        states = self._with_constants.setdefault(layer, WeakSet())
        states.add(state)
        if len(states) > _MAX_STATES_WITH_CONSTANTS:
            raise Refused(
                "it computes with a tensor that is neither a parameter nor a buffer, and that was replaced "
                f"{_MAX_STATES_WITH_CONSTANTS} times; register it as a buffer"
            )

    def forget(self, gone: Container[LayerState]) -> None:
        """Removes states, with their captures."""
        for known in self._states.values():
            known[:] = [state for state in known if state not in gone]

    def of(self, layer: nn.Module, description: Hashable, modes: Hashable) -> LayerState:
        """Returns the state of a layer under the calling thread's modes; a new one if no known one holds."""
        known = self._states.setdefault((description, modes), [])
        self._states.move_to_end((description, modes))
        for state in known:
            if state.holds(layer):
                return state
        known.append(LayerState(self))
        del known[:-_MAX_STATES]
        return known[-1]

    def of_all(
        self, layers: Sequence[nn.Module], descriptions: Iterable[Hashable], modes: Hashable
    ) -> list[LayerState]:
        """Returns the state of each layer, as `of`, and forgets those of descriptions that are long gone."""
        self._most_layers = max(self._most_layers, len(layers))
        found = [self.of(*each, modes) for each in zip(layers, descriptions, strict=True)]
        while len(self._states) > _MAX_DESCRIPTIONS * self._most_layers:
            self._states.popitem(last=False)
        return found


def describe(
    layers: Iterable[nn.Module], snapshot: Snapshot | None = None, in_python: Container[int] = ()
) -> list[Hashable]:
    """Returns a description of each layer; tensors are numbered by their first appearance in all of them.

    Args:
        layers: the layers.
        snapshot: records everything that the descriptions contain, and the modules' attributes.
        in_python: the indices of layers that run in Python, whose attributes are not recorded.
    """
    walk = _Walk(snapshot)
    found: list[Hashable] = []
    for index, layer in enumerate(layers):
        walk.attributes = index not in in_python
        found.append(walk.module(layer))
    return found


class _Walk:
    def __init__(self, snapshot: Snapshot | None) -> None:
        self._snapshot = snapshot
        self.attributes = True
        self._numbers: dict[int, int] = {}
        self._keep_alive: list[object] = []

    def _number(self, value: object) -> tuple[int, bool]:
        number = self._numbers.get(id(value))
        if number is not None:
            return number, False
        self._keep_alive.append(value)
        self._numbers[id(value)] = len(self._numbers)
        return len(self._numbers) - 1, True

    def module(self, module: nn.Module | None) -> Hashable:
        if module is None:
            return None
        number, is_new = self._number(module)
        if not is_new:
            return number
        state = vars(module)
        tables: tuple[Any, ...] = (module._parameters, module._buffers, module._modules)
        if self._snapshot is not None:
            self._snapshot.add_attributes(module, self.attributes)
            if not self.attributes:
                self._snapshot.add_dict_items(state, ["training", "momentum"], False)
            for value in tables if not self.attributes else state.values():
                if isinstance(value, (dict, OrderedDict)):  # not so in a TorchScript module
                    self._snapshot.add_container(value)
        return (
            type(module),
            module.training,
            deferred_momentum(module),
            tuple((name, self.tensor(value)) for name, value in tables[0].items()),
            tuple((name, self.tensor(value)) for name, value in tables[1].items()),
            tuple((name, self.module(value)) for name, value in tables[2].items()),
        )

    def tensor(self, tensor: Tensor | None) -> Hashable:
        if tensor is None:
            return None
        if self._snapshot is not None:
            self._snapshot.add_tensor(tensor)
            self._snapshot.add_container(vars(tensor))
            for owner in owners_of(tensor) if type(tensor) not in (Tensor, nn.Parameter) else ():
                self._snapshot.add_attributes(owner, True)
        number, _ = self._number(tensor)
        if nn.parameter.is_lazy(tensor):
            return (number, type(tensor))
        strides = tensor.stride() if tensor.layout is torch.strided else None
        return (
            number,
            type(tensor),
            tuple(tensor.shape),
            strides,
            bits_of(tensor),
            tensor.dtype,
            kind_of(tensor.device),
            tensor.requires_grad,
            tuple(
                (name, value if isinstance(value, IMMUTABLE) else None)
                for name, value in vars(tensor).items()
                if not name.startswith("_dynamo")  # Dynamo marks the tensors that it captures
            ),
            tuple((path, self.tensor(part)) for path, part in parts_of(tensor).items()),
            self._sharding(tensor),
        )

    def _sharding(self, tensor: Tensor) -> Hashable:
        if not is_sharded(tensor):
            return None
        with torch.no_grad():  # else, a new view
            local = self.tensor(local_tensor(tensor))
        return tensor.placements, tensor.device_mesh, local  # type: ignore[attr-defined]


class StateKey:
    """The state of several layers, as a key: equal keys mean that the same graphs hold.

    Attributes:
        descriptions: the layers' descriptions.
        states: the layers' states.
    """

    __slots__ = ("_counts", "_hash", "descriptions", "states")

    def __init__(self, descriptions: Sequence[Hashable], states: Sequence[LayerState]) -> None:
        self.descriptions = tuple(descriptions)
        self.states = tuple(states)
        self._counts = tuple(len(state.conditions) for state in states)
        self._hash = hash((self.descriptions, self.states))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, StateKey)
            and self._hash == other._hash
            and self.states == other.states
            and self.descriptions == other.descriptions
        )

    @property
    def is_guarded(self) -> bool:
        """Whether there was a capture in the state of each layer."""
        return all(state.conditions for state in self.states)

    @property
    def depends_on_device(self) -> bool:
        """Whether a graph captured in these states holds only on the device of its capture."""
        return any(
            state.has_constants or any(asks_for_device(each.guards) for each in state.conditions)
            for state in self.states
        )

    def changed_since(self, before: StateKey) -> list[int]:
        """Returns the indices of the layers whose state is another in an earlier key."""
        own, other = (list(zip(key.descriptions, key.states, strict=True)) for key in (self, before))
        if len(own) != len(other):
            return [*range(len(own))]
        return [index for index, pair in enumerate(zip(own, other, strict=True)) if pair[0] != pair[1]]

    def holds(self, layers: Sequence[nn.Module]) -> bool:
        """Returns whether layers are in the states in which the key was made."""
        return tuple(describe(layers)) == self.descriptions and self.guards_hold(layers, range(len(layers)))

    def guards_hold(
        self, layers: Sequence[nn.Module], indices: Iterable[int], same_attributes: bool = False
    ) -> bool:
        """Returns whether the layers with these indices are in these states; as `LayerState.holds_for`."""
        seen: set[LayerState] = set()
        for index in indices:
            state, count = self.states[index], self._counts[index]
            if state not in seen and not state.surroundings_hold(count):
                return False
            seen.add(state)
            if not state.holds_for(layers[index], count, same_attributes):
                return False
        return True

    @classmethod
    def of(cls, states: LayerStates, layers: Iterable[nn.Module], modes: Hashable) -> StateKey:
        """Returns the key of layers under the calling thread's modes."""
        layers = list(layers)
        descriptions = [describe([layer])[0] for layer in layers]
        return cls(describe(layers), states.of_all(layers, descriptions, modes))
