"""The cached state of a module's layers: their key, parameters and buffers, updated after a change."""

from __future__ import annotations

from collections.abc import Collection, Container, Set

import torch
from torch import Tensor, nn

from gpipe_fast._extension import Snapshot
from gpipe_fast.layers.sharded import is_sharded
from gpipe_fast.runtime.stage import TorchModes, exact_autocast
from gpipe_fast.trace.joint_graph import buffers_of, parameters_of
from gpipe_fast.trace.layer_states import LayerStates, StateKey, describe


class ModuleState:
    """The key, parameters and buffers of layers, as of the last update() and update_key().

    Attributes:
        layers: the layers.
        key: the layers' state, as far as programs depend on it.
        modes: the calling thread's modes.
        parameters: the parameters of all layers; a shared parameter once.
        buffers: the buffers of all layers; a shared buffer once.
        is_sharded: whether a parameter is sharded.
        devices: the devices of these tensors; a move needs a new plan, where `check_placed` raises.
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
        self._known: dict[TorchModes, tuple[StateKey, int]] = {}  # with the version of the states
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
        key, version = self._known.get(modes, (None, 0))
        if key is None or version != self._states.version or not self._is_key(key, modes):
            version = self._states.version
            key = StateKey.of(self._states, self.layers, modes)
            self._known[modes] = key, version
        self.key = key

    def _is_key(self, key: StateKey, modes: TorchModes) -> bool:
        """Returns whether a key still holds, if the items of no module's ``__dict__`` have changed."""
        # A state without guards holds for any layer, until another is found to hold.
        are_new = all(
            self._states.of(layer, describe([layer])[0], modes) is state
            for state, layer in zip(key.states, self.layers, strict=True)
            if not state.conditions
        )
        return are_new and key.guards_hold(self.layers, range(len(self.layers)), True)

    def follow_captures(self) -> None:
        """Updates the key after captures that may have added guards."""
        _, version = self._known.get(self.modes.of_captures(), (None, None))
        if version != self._states.version:
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
            key, _ = self._known.get(self.modes.of_captures(), (None, 0))
            others = {index for index in self._watched if index not in in_python}
            if not all(self._watched[index].unchanged([self.layers[index]]) for index in others):
                return True
            return key is not None and not key.guards_hold(self.layers, others, True)
