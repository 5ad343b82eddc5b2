"""The cached state of a module's layers: their key, parameters and buffers, updated after a change."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Container, Set

import torch
from torch import Tensor, nn

from gpipe_fast._extension import Snapshot
from gpipe_fast.layers.sharded import is_sharded
from gpipe_fast.runtime.stage import TorchModes, exact_autocast
from gpipe_fast.trace.dynamo import Check, Scope, scope_of
from gpipe_fast.trace.joint_graph import buffers_of, parameters_of
from gpipe_fast.trace.layer_states import LayerStates, StateKey, describe
from gpipe_fast.trace.unguarded import unguarded_state


class _KnownKey:
    """A key of layers, and the checks that tell whether it still is their key."""

    def __init__(self, states: LayerStates, layers: list[nn.Module], modes: TorchModes) -> None:
        self.version = states.version
        self.key = StateKey.of(states, layers, modes)
        guards = [guards for state in dict.fromkeys(self.key.states) for guards in state.guards]
        self._unguarded_unchanged = unguarded_state(guards)
        self._objects = Snapshot()
        self._checks: list[tuple[Check, Scope]] = []
        known: list[frozenset[str]] = []
        for each in sorted(guards, key=lambda each: -len(each.ambient_conditions)):
            if not any(each.ambient_conditions <= conditions for conditions in known):
                known.append(each.ambient_conditions)
                self._checks.append((each.ambient, scope_of(layers[0])))
        # A state without guards holds for any layer, until another is found to hold.
        self._new_states = [
            (functools.partial(states.of, layer, describe([layer])[0], modes), state)
            for state, layer in zip(self.key.states, layers, strict=True)
            if not state.guards
        ]
        for state, layer in zip(self.key.states, layers, strict=True):
            checks = [each.deep for each in state.guards if each.deep is not None]
            checks += [facts.still_hold for facts in state.facts if facts.may_change]
            for facts in state.facts:
                facts.watch(self._objects, layer)
            checks += itertools.chain(*state.constants)
            self._checks += [(check, scope_of(layer)) for check in checks]

    def holds(self) -> bool:
        """Returns whether this still is the key, if the items of no module's ``__dict__`` have changed."""
        if any(find() is not state for find, state in self._new_states):
            return False
        return self.guards_hold()

    def guards_hold(self) -> bool:
        """Returns whether no guard fails, if the items of no module's ``__dict__`` have changed."""
        if not self._unguarded_unchanged() or not self._objects.unchanged(()):
            return False
        for check, scope in self._checks:  # noqa: SIM110 (twice as slow)
            if not check(scope):
                return False
        return True


class ModuleState:
    """The key, parameters and buffers of layers, as of the last update() and update_key().

    Attributes:
        layers: the layers.
        key: the layers' state, as far as programs depend on it.
        modes: the calling thread's modes.
        parameters: the parameters of all layers; a shared parameter once.
        buffers: the buffers of all layers; a shared buffer once.
        is_sharded: whether a parameter is sharded.
        devices: the devices of these tensors, on which no program depends.
    """

    def __init__(self, states: LayerStates, in_python: Set[int] = frozenset()) -> None:
        """Makes an empty state.

        Args:
            states: the known states of the layers.
            in_python: the indices of layers that run in Python; may grow.
        """
        self._states = states
        self._in_python = in_python
        self._num_in_python = 0
        self.modes = TorchModes.now()
        self.layers: list[nn.Module] = []
        self.key = StateKey((), ())
        self.parameters: list[nn.Parameter] = []
        self.buffers: list[Tensor] = []
        self.is_sharded = False
        self.devices: tuple[torch.device, ...] = ()
        self._snapshot: Snapshot | None = None
        self._known: dict[TorchModes, _KnownKey] = {}
        self._watched: dict[int, Snapshot] = {}

    def update(self, layers: Collection[nn.Module]) -> bool:
        """Updates all but the key and the modes; returns whether modules or their tensors were changed."""
        changed = (
            self._snapshot is None
            or len(self._in_python) != self._num_in_python
            or not self._snapshot.unchanged(layers)
        )
        if changed:
            self._snapshot, snapshot = None, Snapshot()  # None: an update that Ctrl-C ends is repeated
            snapshot.set_roots(layers)
            self.layers = list(layers)
            self._num_in_python = len(self._in_python)
            describe(self.layers, snapshot, self._in_python)
            self.parameters = parameters_of(layers)
            self.buffers = buffers_of(layers)
            self.is_sharded = any(map(is_sharded, self.parameters))
            self.devices = tuple(tensor.device for tensor in (*self.parameters, *self.buffers))
            self._known.clear()
            self._snapshot = snapshot
        return changed

    def update_key(self) -> None:
        """Updates the key and the modes, if the modules are as they were at the last update()."""
        self.modes = TorchModes.now()
        modes = self.modes.of_captures()
        known = self._known.get(modes)
        if known is None or known.version != self._states.version or not known.holds():
            known = self._known[modes] = _KnownKey(self._states, self.layers, modes)
        self.key = known.key

    def follow_captures(self) -> None:
        """Updates the key after captures that may have added guards."""
        known = self._known.get(self.modes.of_captures())
        if known is None or known.version != self._states.version:
            self.update_key()

    def watch(self) -> None:
        """Remembers the attributes of all layers that do not run in Python, for `is_changed`."""
        before, self._watched = self._watched, {}
        for index, layer in enumerate(self.layers):
            if index in self._in_python:
                continue
            snapshot = before.get(index)
            if snapshot is None or not snapshot.unchanged([layer]):
                snapshot = Snapshot()
                snapshot.set_roots([layer])
                describe([layer], snapshot)
            self._watched[index] = snapshot

    def is_changed(self, in_python: Container[int]) -> bool:
        """Returns whether anything that these layers read has changed since `watch`.

        Args:
            in_python: the indices of layers that have run in Python since then, which may change themselves.
        """
        with torch.set_grad_enabled(self.modes.grad), exact_autocast(self.modes.autocast):  # for the guards
            return self._is_changed(in_python)

    def _is_changed(self, in_python: Container[int]) -> bool:
        known = self._known.get(self.modes.of_captures())
        others = {index for index in self._watched if index not in in_python}
        if not all(self._watched[index].unchanged([self.layers[index]]) for index in others):
            return True
        # Quicker for all layers; but those in Python may change what they themselves read.
        return known is not None and not known.guards_hold() and not known.key.hold(self.layers, others)
