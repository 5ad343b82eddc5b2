"""A copy of the Python state before a trace, to detect and undo the changes that the trace makes."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_fast.trace import kinds
from gpipe_fast.trace.fingerprint import LARGEST_ARRAY, OWN
from gpipe_fast.trace.kinds import Kind, kind_of
from gpipe_fast.trace.reads import Entry

# Prefix of `Change.what` for random generators.
GENERATOR = "the NumPy generator"
# Maximum number of containers and objects that are copied, nearest to the layers first.
_MOST = 20_000


class Change(NamedTuple):
    """One piece of Python state that was changed.

    Attributes:
        layer: index of the layer that holds the state; None for state outside of the layers.
        what: the state's name in messages.
    """

    layer: int | None
    what: str


@dataclass
class _Noted:
    """One piece of mutable state; ``now`` returns its current value."""

    change: Change
    is_changed: Callable[[], bool]
    put_back: Callable[[], None]
    now: Callable[[], Any]


class Before:
    """Copies of the state that layers hold and refer to.

    State outside of the layers is added by `note` while the layers run, before they use it.

    Attributes:
        iterators: state that cannot be copied, because reading it would change it.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.iterators: list[tuple[Change, object]] = []
        self._seen: set[int] = set()
        self._noted: list[_Noted] = []
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
        self._work_off()

    def note(self, entry: Entry) -> None:
        """Copies an item of a namespace, and the values to which it refers."""
        if entry.key not in entry.namespace:
            return
        namespace, key, value = entry.namespace, entry.key, entry.namespace[entry.key]

        def put_back() -> None:
            namespace[key] = value

        def is_changed() -> bool:
            return namespace.get(key, put_back) is not value

        self._noted.append(
            _Noted(Change(None, entry.label), is_changed, put_back, lambda: namespace.get(key))
        )
        self._pending.append((value, Change(None, entry.label)))
        self._work_off()

    def changed_outside(self) -> list[Change]:
        """Returns the changes to state outside of the layers."""
        return [noted.change for noted in self._noted if noted.change.layer is None and noted.is_changed()]

    def changes(self) -> list[Change]:
        """Returns all changes, except to parameters and buffers, which tracing swaps itself."""
        found = [noted.change for noted in self._noted if noted.is_changed()]
        found += [Change(index, _join(name, key)) for index, name, _, _, key in self._changed_attributes()]
        own = {_join(name, key) for _, name, _, _ in self._modules for key in OWN}
        return [change for change in dict.fromkeys(found) if change.layer is None or change.what not in own]

    def holds_tracing_tensors(self) -> bool:
        """Returns whether any changed state refers to a tensor or symbol of the trace."""
        values = [noted.now() for noted in self._noted if noted.is_changed()]
        values += [vars(module).get(key) for _, _, module, _, key in self._changed_attributes()]
        seen: set[int] = set()
        while values and len(seen) < _MOST:
            value = values.pop()
            if isinstance(value, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
                return True
            if id(value) not in seen:
                seen.add(id(value))
                values += kinds.referred_to_by(value)
        return bool(values)

    def put_back(self) -> None:
        """Restores all state."""
        for noted in self._noted:
            if noted.is_changed():
                noted.put_back()
        self._put_attributes_back(lambda key: True)

    def put_tensors_back(self) -> None:
        """Restores the parameters and buffers, which tracing swaps, and no other state."""
        self._put_attributes_back(lambda key: key in OWN)
        for noted in self._noted:
            if noted.change.what.split(".")[-1] in OWN and noted.is_changed():
                noted.put_back()

    def _changed_attributes(self) -> Iterator[tuple[int, str, nn.Module, dict[str, Any], str]]:
        for index, name, module, before in self._modules:
            state = vars(module)
            for key in state | before:
                if state.get(key, self) is not before.get(key, self) and key not in OWN:
                    yield index, name, module, before, key

    def _put_attributes_back(self, chosen: Callable[[str], bool]) -> None:
        for _, _, module, before in self._modules:
            state = vars(module)
            for key in [k for k in state if k not in before and chosen(k)]:
                del state[key]
            for key, value in before.items():
                if chosen(key) and state.get(key, before) is not value:
                    state[key] = value

    def _work_off(self) -> None:
        while self._pending and len(self._seen) < _MOST:
            value, change = self._pending.popleft()
            kind = kind_of(value)
            if kind is Kind.PLAIN or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._note_value(value, kind, change)
            self._pending.extend((part, change) for part in kinds.referred_to_by(value))
        self._pending.clear()

    def _note_value(self, value: Any, kind: Kind, change: Change) -> None:
        match kind:
            case Kind.CONTAINER:
                self._note_container(value, change)
            case Kind.MODULE | Kind.OBJECT:
                self._note_object(value, change)
            case Kind.FUNCTION if not kinds.is_fixed(value.__module__):
                self._note_function(value, change)
            case Kind.CLASS if not kinds.is_fixed(value.__module__):
                self._note_class(value, change)
            case Kind.ARRAY:
                self._note_array(value, change)
            case Kind.GENERATOR:
                self._note_generator(value, change)
            case Kind.UNGUARDABLE:
                self.iterators.append((change, value))

    def _note_container(self, value: Any, change: Change) -> None:
        before = kinds.items_of(value)
        identities = _identities(value)

        def is_changed() -> bool:
            return _identities(value) != identities

        self._noted.append(_Noted(change, is_changed, lambda: kinds.fill(value, before), lambda: value))

    def _note_object(self, value: Any, change: Change) -> None:
        state = kinds.attributes_of(value)
        if state is not None:
            self._note_container(state, change)
        for slot in kinds.slots_of(value):
            self._note_slot(value, slot, change)

    def _note_slot(self, value: Any, slot: kinds.Slot, change: Change) -> None:
        self._noted.append(
            _Noted(
                change,
                lambda: getattr(value, slot.name, change) is not slot.value,
                lambda: object.__setattr__(value, slot.name, slot.value),
                lambda: getattr(value, slot.name, None),
            )
        )

    def _note_function(self, function: Any, change: Change) -> None:
        for name, cell in kinds.cells_of(function).items():
            self._note_cell(cell, cell.cell_contents, change._replace(what=f"the variable {name}"))
        label = change._replace(what=f"the function {function.__name__}")
        self._note_container(function.__dict__, label)

    def _note_cell(self, cell: Any, content: Any, change: Change) -> None:
        def put_back() -> None:
            cell.cell_contents = content

        self._noted.append(
            _Noted(change, lambda: cell.cell_contents is not content, put_back, lambda: cell.cell_contents)
        )

    def _note_class(self, cls: type, change: Change) -> None:
        before = {k: v for k, v in vars(cls).items() if not k.startswith("__")}

        def changed() -> set[str]:
            now = {k: v for k, v in vars(cls).items() if not k.startswith("__")}
            return {k for k in before.keys() | now.keys() if before.get(k, now) is not now.get(k, before)}

        def put_back() -> None:
            for name in changed():
                setattr(cls, name, before[name]) if name in before else delattr(cls, name)

        label = change._replace(what=f"the class {cls.__name__}")
        self._noted.append(_Noted(label, lambda: bool(changed()), put_back, lambda: dict(vars(cls))))

    def _note_generator(self, generator: Any, change: Change) -> None:
        before = pickle.dumps(kinds.state_of(generator))
        self._noted.append(
            _Noted(
                change._replace(what=f"{GENERATOR} {change.what}"),
                lambda: pickle.dumps(kinds.state_of(generator)) != before,
                lambda: kinds.set_state(generator, pickle.loads(before)),
                lambda: generator,
            )
        )

    def _note_array(self, array: Any, change: Change) -> None:
        if memoryview(array).nbytes > LARGEST_ARRAY:
            return
        content, copied = memoryview(array).tobytes(), array[:].copy() if hasattr(array, "copy") else array[:]

        def put_back() -> None:
            array[:] = copied

        self._noted.append(
            _Noted(change, lambda: memoryview(array).tobytes() != content, put_back, lambda: array)
        )


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _identities(container: Any) -> list[int] | set[int]:
    """Returns the ids of all keys and values in a container, in order unless the container is a set."""
    found = list(map(id, kinds.referred_to_by(container)))
    return set(found) if isinstance(container, set) else found
