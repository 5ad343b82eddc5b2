"""The Python state that a lowered program depends on, as a hashable value.

One walk reads modules, their attributes, the objects that these refer to, and the state outside of the
modules that forward reads (`python_reads`). If a `Snapshot` is given, the walk records every object in it
before reading the object, so that C++ can check later, in microseconds, whether anything has changed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container, Hashable, Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_fast._extension import Snapshot
from gpipe_fast.layers.skip import Namespace
from gpipe_fast.trace import python_values
from gpipe_fast.trace.joint_graph import buffers_of, parameters_of
from gpipe_fast.trace.python_reads import NamespaceEntry, reads_of
from gpipe_fast.trace.python_values import ValueKind, value_kind

MODULE_STATE = frozenset({"_parameters", "_buffers", "_modules", "training"})
# Bytes of the largest array that is compared before every call.
MAX_ARRAY_BYTES = 1 << 16
# Maximum number of items in containers and objects that are compared before every call, per layer.
MAX_ITEMS = 20_000
_MISSING = ("missing",)


class _Identity:
    """An object compared by identity. Holds the object, so that its address is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class _NullSnapshot:
    """A snapshot that records nothing."""

    def ignore(self, *arguments: object) -> None:
        """Does nothing."""

    set_roots = add_attributes = add_container = add_dict_items = add_cell = ignore
    add_class = add_tensor = add_array = add_slot = ignore


class ModuleInteger(NamedTuple):
    """An integer attribute of a module."""

    module: nn.Module
    name: str
    value: int


class _FingerprintWalk:
    """The walk that computes one fingerprint.

    Namespaces of skip connections, and the layers' parameters and buffers, are numbered by first appearance:
    a fingerprint says which tensors are tied and which layers share a namespace, not which objects they are.
    Tensors of other modules, to which attributes refer, are constants of a trace: they are compared by
    identity.
    """

    def __init__(
        self, layers: Sequence[nn.Module], traced: Iterable[nn.Module], snapshot: Snapshot | None
    ) -> None:
        self.layers = layers
        known = [r for r in map(reads_of, traced) if r is not None]
        self.snapshot: Any = _NullSnapshot() if snapshot is None else snapshot
        self.entries: dict[tuple[int, Any], NamespaceEntry] = {}
        for read in known:
            self.entries |= read.entries
        # None: no layer was traced yet, so the attributes that forward reads are unknown.
        self.names = frozenset[str]().union(*(r.attributes for r in known)) if known else None
        self.any_attribute = any(r.any_attribute for r in known)
        self.instance_dict = any(r.instance_dict for r in known)
        self.identity = any(r.identity for r in known)
        self.in_attribute = False  # whether the current module may belong to no layer
        self.object_numbers: dict[int, int] = {}  # of modules, objects and functions, by id
        self.tensors: dict[int, int] = {}
        self.namespaces: dict[Namespace, int] = {}
        self.classes: dict[type, Hashable] = {}
        self.enclosing: set[int] = set()  # ids of the containers around the current value
        self.keep_alive: list[object] = []  # keeps numbered objects alive, so that their ids are not reused
        self.attributes = True  # whether attributes of modules are part of the fingerprint
        # Collects the integer attributes of modules, if they are not part of the fingerprint; else None.
        self.integers: list[ModuleInteger] | None = None
        self.num_items = 0
        self.problem: str | None = None

    def tensor(self, tensor: Tensor | None) -> Hashable:
        if tensor is None:
            return None
        self.snapshot.add_tensor(tensor)
        number = self.tensors.setdefault(id(tensor), len(self.tensors))
        if nn.parameter.is_lazy(tensor):
            return (number, type(tensor))
        strides = tensor.stride() if tensor.layout is torch.strided else None
        is_constant = self.in_attribute and id(tensor) not in self._own_tensors
        return (
            _Identity(tensor) if is_constant else number,
            type(tensor),
            tuple(tensor.shape),
            strides,
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
        )

    def attribute(self, value: Any, label: str = "") -> Hashable:
        kind = value_kind(value)
        if kind is ValueKind.IMMUTABLE:
            # 1, 1.0 and True are equal but trace differently.
            return (type(value), value)
        if kind is ValueKind.MODULE:
            return self._module_in_attribute(value)
        if kind is ValueKind.TUPLE or kind is ValueKind.CONTAINER:
            return self._container(value, kind, label)
        if kind is ValueKind.OBJECT:
            return self._object(value)
        if kind is ValueKind.FUNCTION:
            return self._function(value)
        if kind is ValueKind.REFERENCES:
            return (type(value), *map(self.attribute, python_values.references_of(value)))
        if kind is ValueKind.CLASS:
            self._class(value)
        elif kind is ValueKind.ARRAY:
            return self._array(value, label)
        elif kind in (ValueKind.ITERATOR, ValueKind.HIDDEN) and self._may_be_read(label):
            self.problem = self.problem or hidden_state_message(label, value)
        return _Identity(value)

    def module(self, module: nn.Module | None) -> Hashable:
        if module is None:
            return None
        number, is_new = self._number(module)
        if not is_new:
            return number
        if self.attributes:
            self.snapshot.add_attributes(module, True)
            self._class(type(module))
        else:
            self.snapshot.add_attributes(module, False)
        state = vars(module)
        for name in ("_parameters", "_buffers", "_modules"):
            if isinstance(state[name], dict):  # not so in a TorchScript module
                self.snapshot.add_container(state[name])
        if not self.attributes:
            self.snapshot.add_dict_items(state, ["training", "momentum"], False)
        return (
            _Identity(module) if self.identity else None,
            type(module),
            module.training,
            tuple((k, self.tensor(v)) for k, v in module._parameters.items()),
            tuple((k, self.tensor(v)) for k, v in module._buffers.items()),
            tuple(
                (k, v)
                for k in state
                if k not in MODULE_STATE and (v := self._module_attribute(module, k, state[k])) is not None
            ),
            tuple((k, self.module(v)) for k, v in module._modules.items()),
        )

    def _module_in_attribute(self, module: nn.Module) -> Hashable:
        before, self.in_attribute = self.in_attribute, True
        found = self.module(module)
        self.in_attribute = before
        return found

    @functools.cached_property
    def _own_tensors(self) -> set[int]:
        """The ids of the layers' parameters and buffers."""
        return {id(tensor) for tensor in (*parameters_of(self.layers), *buffers_of(self.layers))}

    def entry(self, entry: NamespaceEntry) -> Hashable:
        """Returns the key and the value of a namespace item, such as a global variable."""
        value = entry.namespace.get(entry.key, _MISSING)
        if isinstance(value, ModuleType):  # the attributes that forward reads are entries of their own
            return (str(entry.key), _Identity(value))
        return (str(entry.key), _MISSING if value is _MISSING else self.attribute(value, entry.label))

    def _module_attribute(self, module: nn.Module, key: str, value: Any) -> Hashable:
        # A plan depends on the momentum of deferred batch norms.
        if not self.attributes and not key.endswith("_hooks") and key != "momentum":
            return None
        if isinstance(value, (dict, set)) and not value:  # an empty hook table
            self.snapshot.add_container(value)
            return None
        if type(value) is int and self.integers is not None and not self.instance_dict:
            self.integers.append(ModuleInteger(module, key, value))
            return (int,)
        return self.attribute(value, key)

    def _number(self, value: object) -> tuple[int, bool]:
        """Returns an object's number, and whether this is its first appearance."""
        number = self.object_numbers.get(id(value))
        if number is not None:
            return number, False
        self.keep_alive.append(value)
        self.object_numbers[id(value)] = len(self.object_numbers)
        return len(self.object_numbers) - 1, True

    def _container(self, value: Any, kind: ValueKind, label: str) -> Hashable:
        if id(value) in self.enclosing:
            return ("recursive",)
        self.enclosing.add(id(value))
        if kind is ValueKind.CONTAINER:
            self.snapshot.add_container(value)
        items = python_values.container_items(value)
        self.num_items += len(items)
        found: Hashable
        if isinstance(value, dict):
            found = (type(value), *((self.attribute(k), self.attribute(v, label)) for k, v in items))
        elif isinstance(value, (set, frozenset)):
            found = (type(value), frozenset(map(self.attribute, items)))
        else:
            found = (type(value), *(self.attribute(item, label) for item in items))
        if type(value).__module__ not in ("builtins", "collections") and self.names is not None:
            found = (found, *self._instance_state(value))
        self.enclosing.discard(id(value))
        return found

    def _object(self, value: Any) -> Hashable:
        cls: Any = type(value)
        if cls is Namespace:
            return (Namespace, self.namespaces.setdefault(value, len(self.namespaces)))
        number, is_new = self._number(value)
        if not is_new:
            return (cls, number)
        if self.names is None and not dataclasses.is_dataclass(value):
            return (cls, number)  # its reads are unknown before the first trace
        self._class(cls)
        return (cls, number, *self._instance_state(value))

    def _instance_state(self, value: Any) -> list[Hashable]:
        """Returns the attributes of an object that forward may read."""
        cls: Any = type(value)
        read_all = self.names is None or self.any_attribute or python_values.has_dynamic_attributes(cls)
        state = python_values.attributes_of(value)
        found: list[Hashable] = []
        if state is not None and state is not value:  # a dict may be its own dictionary
            self.snapshot.add_attributes(value, read_all)
            keys = [k for k in state if read_all or k in self.names]  # type: ignore[operator]
            if not read_all:
                inherited = [k for k in self.names or () if k not in state and hasattr(cls, k)]
                self.snapshot.add_dict_items(state, [*keys, *inherited], False)
            self.num_items += len(keys)
            found += [(k, self.attribute(state[k], k)) for k in keys]
        for slot in python_values.slots_of(value):
            if read_all or slot.name in self.names:  # type: ignore[operator]
                self.snapshot.add_slot(value, slot.name)
                found.append((slot.name, self.attribute(slot.value, slot.name)))
        return found

    def _function(self, function: Any) -> Hashable:
        if python_values.is_assumed_constant(function.__module__):
            return _Identity(function)
        number, is_new = self._number(function)
        if not is_new:
            return number
        found: list[Hashable] = [_Identity(function.__code__)]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.snapshot.add_cell(cell)
            try:
                found.append(self.attribute(cell.cell_contents, f"the variable {name}"))
            except ValueError:  # an empty cell
                found.append(_MISSING)
        for value in (function.__defaults__, function.__kwdefaults__, function.__dict__ or None):
            if value is not None:
                found.append(self.attribute(value, f"the function {function.__name__}"))
        return tuple(found)

    def _class(self, cls: type) -> None:
        """Adds the attributes of a class and its bases, once per class."""
        for base in cls.__mro__:
            if base in self.classes or not python_values.is_heap_type(base):
                continue
            self.classes[base] = None
            self.snapshot.add_class(base)
            fixed = python_values.is_assumed_constant(base.__module__)
            found = [
                (name, _Identity(value) if fixed else self.attribute(value, name))
                for name, value in list(vars(base).items())
                if value_kind(value) in (ValueKind.FUNCTION, ValueKind.REFERENCES)
                or (not fixed and self._is_read(name))
            ]
            self.classes[base] = tuple(found)

    def _may_be_read(self, label: str) -> bool:
        return self.names is None or label in self.names or " " in label

    def _is_read(self, name: str) -> bool:
        return self.names is not None and not name.startswith("__") and name in self.names

    def _array(self, value: Any, label: str) -> Hashable:
        view = memoryview(value)
        if view.nbytes > MAX_ARRAY_BYTES:
            if self._may_be_read(label):
                self.problem = self.problem or (
                    f"it reads {label}, an array of {view.nbytes:,} bytes, too large to be compared before "
                    "every call; store it in a buffer of the module instead"
                )
            return _Identity(value)
        self.snapshot.add_array(value)
        return (type(value), view.format, view.shape, view.tobytes())


def fingerprint(
    layers: Iterable[nn.Module], in_python: Container[int] = (), snapshot: Snapshot | None = None
) -> Hashable:
    """Returns a value that differs whenever a trace of ``layers`` would differ.

    The fingerprint covers classes, training mode, attributes (plain values, containers, objects and functions
    by value, all others by identity), hooks, and the shape, strides, dtype, device, ``requires_grad`` and
    ties of parameters and buffers, but not their contents. It covers the global variables, environment
    variables and attributes of objects and classes that the layers read in earlier traces. Equal layers have
    equal fingerprints.

    Args:
        layers: the layers.
        in_python: indices of layers that run in Python. Of their attributes, which may change as the layers
            run, only ``training``, ``momentum`` and hooks are covered.
        snapshot: records every object that is read.
    """
    layers = list(layers)
    if snapshot is not None:
        snapshot.set_roots(layers)
    traced = [layer for index, layer in enumerate(layers) if index not in in_python]
    walk = _FingerprintWalk(layers, traced, snapshot)
    found: list[Hashable] = []
    for index, layer in enumerate(layers):
        walk.attributes = index not in in_python
        found.append(walk.module(layer))
    _record_entries(walk)
    entries = tuple(walk.entry(entry) for entry in walk.entries.values())
    return (tuple(found), entries, tuple(walk.classes.items()))


def fingerprint_without_integers(layers: Sequence[nn.Module]) -> tuple[Hashable, list[ModuleInteger]]:
    """Returns a fingerprint without the integer attributes of modules, and these, in a fixed order.

    Layers often hold their own number (``layer_idx``), which makes otherwise equal layers differ.
    """
    walk = _FingerprintWalk(layers, layers, None)
    integers = walk.integers = []
    found = tuple(map(walk.module, layers))
    entries = tuple(walk.entry(entry) for entry in walk.entries.values())
    return (found, entries, tuple(walk.classes.items())), integers


def _record_entries(walk: _FingerprintWalk) -> None:
    by_namespace: dict[int, list[NamespaceEntry]] = {}
    for entry in walk.entries.values():
        by_namespace.setdefault(id(entry.namespace), []).append(entry)
    for entries in by_namespace.values():
        walk.snapshot.add_dict_items(entries[0].namespace, [entry.key for entry in entries], False)


def hidden_state_message(label: str, value: object) -> str:
    """Returns the message for a value that cannot be guarded, since it can neither be copied nor compared."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return f"it reads {label} ({kind}), whose state cannot be compared"


def unguardable_reason(layer: nn.Module) -> str | None:
    """Returns why the state that a layer reads cannot be guarded; None if it can."""
    walk = _FingerprintWalk([layer], [layer], None)
    walk.module(layer)
    for entry in walk.entries.values():
        walk.entry(entry)
    if walk.problem is None and walk.num_items > MAX_ITEMS:
        return (
            f"it reads Python state of {walk.num_items:,} items, more than the {MAX_ITEMS:,} that can be "
            "compared before every call"
        )
    return walk.problem
