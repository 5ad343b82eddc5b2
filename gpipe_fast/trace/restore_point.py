"""A copy of the Python state before a trace, to detect and undo the changes that the trace makes."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_fast.trace import python_values
from gpipe_fast.trace.fingerprint import MAX_ARRAY_BYTES, MODULE_STATE
from gpipe_fast.trace.python_reads import NamespaceEntry
from gpipe_fast.trace.python_values import ValueKind, value_kind

# Prefix of `Change.label` for random generators.
GENERATOR = "the NumPy generator"
# Maximum number of containers and objects that are copied, nearest to the layers first.
_MAX_OBJECTS = 20_000


class Change(NamedTuple):
    """One piece of Python state that was changed.

    Attributes:
        layer: index of the layer that holds the state; None for state outside of the layers.
        label: the state's name in messages.
    """

    layer: int | None
    label: str


@dataclass
class _SavedState:
    """One piece of mutable state; ``now`` returns its current value."""

    change: Change
    is_changed: Callable[[], bool]
    restore: Callable[[], None]
    now: Callable[[], Any]


class RestorePoint:
    """Copies of the state that layers hold and refer to.

    State outside of the layers is added by `save` while the layers run, before they use it.

    Attributes:
        iterators: state that cannot be copied, because reading it would change it.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.iterators: list[tuple[Change, object]] = []
        self._seen: set[int] = set()
        self._saved_states: list[_SavedState] = []
        self._modules: list[tuple[int, str, nn.Module, dict[str, Any]]] = []
        self._pending: deque[tuple[Any, Change]] = deque()
        for index, layer in enumerate(layers):
            for name, module in layer.named_modules():
                if id(module) in self._seen:
                    continue
                self._seen.add(id(module))
                self._modules.append((index, name, module, dict(vars(module))))
                for key, value in vars(module).items():
                    self._pending.append((value, Change(index, f"{name}.{key}".lstrip("."))))
                self._pending.append((type(module), Change(index, type(module).__name__)))
        self._process_pending()

    def save(self, entry: NamespaceEntry) -> None:
        """Copies an item of a namespace, and the values to which it refers."""
        if entry.key not in entry.namespace:
            return
        namespace, key, value = entry.namespace, entry.key, entry.namespace[entry.key]

        def restore() -> None:
            namespace[key] = value

        def is_changed() -> bool:
            return namespace.get(key, restore) is not value

        self._saved_states.append(
            _SavedState(Change(None, entry.label), is_changed, restore, lambda: namespace.get(key))
        )
        if not isinstance(value, ModuleType):  # the attributes that forward reads are entries of their own
            self._pending.append((value, Change(None, entry.label)))
            self._process_pending()

    def outside_changes(self) -> list[Change]:
        """Returns the changes to state outside of the layers."""
        return [
            saved.change for saved in self._saved_states if saved.change.layer is None and saved.is_changed()
        ]

    def changes(self) -> list[Change]:
        """Returns all changes, except to parameters and buffers, which tracing itself replaces."""
        found = [saved.change for saved in self._saved_states if saved.is_changed()]
        found += [
            Change(index, _qualified_name(name, key)) for index, name, _, _, key in self._changed_attributes()
        ]
        own = {_qualified_name(name, key) for _, name, _, _ in self._modules for key in MODULE_STATE}
        return [change for change in dict.fromkeys(found) if change.layer is None or change.label not in own]

    def holds_tracing_tensors(self) -> bool:
        """Returns whether any changed state refers to a tensor or symbol of the trace."""
        values = [saved.now() for saved in self._saved_states if saved.is_changed()]
        values += [vars(module).get(key) for _, _, module, _, key in self._changed_attributes()]
        seen: set[int] = set()
        while values and len(seen) < _MAX_OBJECTS:
            value = values.pop()
            if isinstance(value, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
                return True
            if id(value) not in seen:
                seen.add(id(value))
                values += python_values.referents_of(value)
        return bool(values)

    def restore(self) -> None:
        """Restores all state."""
        for saved in self._saved_states:
            if saved.is_changed():
                saved.restore()
        self._restore_attributes(lambda key: True)

    def restore_tensors(self) -> None:
        """Restores the parameters and buffers, which tracing replaces, and no other state."""
        self._restore_attributes(lambda key: key in MODULE_STATE)
        for saved in self._saved_states:
            if saved.change.label.split(".")[-1] in MODULE_STATE and saved.is_changed():
                saved.restore()

    def _changed_attributes(self) -> Iterator[tuple[int, str, nn.Module, dict[str, Any], str]]:
        for index, name, module, before in self._modules:
            state = vars(module)
            for key in state | before:
                if state.get(key, self) is not before.get(key, self) and key not in MODULE_STATE:
                    yield index, name, module, before, key

    def _restore_attributes(self, chosen: Callable[[str], bool]) -> None:
        for _, _, module, before in self._modules:
            state = vars(module)
            for key in [k for k in state if k not in before and chosen(k)]:
                del state[key]
            for key, value in before.items():
                if chosen(key) and state.get(key, before) is not value:
                    state[key] = value

    def _process_pending(self) -> None:
        while self._pending and len(self._seen) < _MAX_OBJECTS:
            value, change = self._pending.popleft()
            kind = value_kind(value)
            if kind is ValueKind.IMMUTABLE or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._save_value(value, kind, change)
            self._pending.extend((part, change) for part in python_values.referents_of(value))
        self._pending.clear()

    def _save_value(self, value: Any, kind: ValueKind, change: Change) -> None:
        match kind:
            case ValueKind.CONTAINER:
                self._save_container(value, change)
            case ValueKind.MODULE | ValueKind.OBJECT:
                self._save_object(value, change)
            case ValueKind.FUNCTION if not python_values.is_assumed_constant(value.__module__):
                self._save_function(value, change)
            case ValueKind.CLASS if not python_values.is_assumed_constant(value.__module__):
                self._save_class(value, change)
            case ValueKind.ARRAY:
                self._save_array(value, change)
            case ValueKind.GENERATOR:
                self._save_generator(value, change)
            case ValueKind.ITERATOR:
                self.iterators.append((change, value))

    def _save_container(self, value: Any, change: Change) -> None:
        before = python_values.container_items(value)
        identities = _element_ids(value)

        def is_changed() -> bool:
            return _element_ids(value) != identities

        self._saved_states.append(
            _SavedState(change, is_changed, lambda: python_values.replace_items(value, before), lambda: value)
        )

    def _save_object(self, value: Any, change: Change) -> None:
        state = python_values.attributes_of(value)
        if state is not None:
            self._save_container(state, change)
        for slot in python_values.slots_of(value):
            self._save_slot(value, slot, change)

    def _save_slot(self, value: Any, slot: python_values.Slot, change: Change) -> None:
        self._saved_states.append(
            _SavedState(
                change,
                lambda: getattr(value, slot.name, change) is not slot.value,
                lambda: object.__setattr__(value, slot.name, slot.value),
                lambda: getattr(value, slot.name, None),
            )
        )

    def _save_function(self, function: Any, change: Change) -> None:
        for name, cell in python_values.cells_of(function).items():
            self._save_cell(cell, cell.cell_contents, change._replace(label=f"the variable {name}"))
        label = change._replace(label=f"the function {function.__name__}")
        self._save_container(function.__dict__, label)

    def _save_cell(self, cell: Any, content: Any, change: Change) -> None:
        def restore() -> None:
            cell.cell_contents = content

        self._saved_states.append(
            _SavedState(
                change, lambda: cell.cell_contents is not content, restore, lambda: cell.cell_contents
            )
        )

    def _save_class(self, cls: type, change: Change) -> None:
        before = {k: v for k, v in vars(cls).items() if not k.startswith("__")}

        def changed() -> set[str]:
            now = {k: v for k, v in vars(cls).items() if not k.startswith("__")}
            return {k for k in before.keys() | now.keys() if before.get(k, now) is not now.get(k, before)}

        def restore() -> None:
            for name in changed():
                setattr(cls, name, before[name]) if name in before else delattr(cls, name)

        label = change._replace(label=f"the class {cls.__name__}")
        self._saved_states.append(
            _SavedState(label, lambda: bool(changed()), restore, lambda: dict(vars(cls)))
        )

    def _save_generator(self, generator: Any, change: Change) -> None:
        before = pickle.dumps(python_values.generator_state(generator))
        self._saved_states.append(
            _SavedState(
                change._replace(label=f"{GENERATOR} {change.label}"),
                lambda: pickle.dumps(python_values.generator_state(generator)) != before,
                lambda: python_values.set_state(generator, pickle.loads(before)),
                lambda: generator,
            )
        )

    def _save_array(self, array: Any, change: Change) -> None:
        if memoryview(array).nbytes > MAX_ARRAY_BYTES:
            return
        content, copied = memoryview(array).tobytes(), array[:].copy() if hasattr(array, "copy") else array[:]

        def restore() -> None:
            array[:] = copied

        self._saved_states.append(
            _SavedState(change, lambda: memoryview(array).tobytes() != content, restore, lambda: array)
        )


def _qualified_name(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _element_ids(container: Any) -> list[int] | set[int]:
    """Returns the ids of all keys and values in a container, in order unless the container is a set."""
    found = list(map(id, python_values.referents_of(container)))
    return set(found) if isinstance(container, set) else found
