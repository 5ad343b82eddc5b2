"""Python state that a layer's forward reads outside its module: global variables and attributes, by name.

A trace runs forward once, so every value that it reads becomes a constant. The bytecode of each Python
function that runs during the trace names the global variables and attributes that the function can read. From
then on these are guarded; see `fingerprint`.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any

from torch import nn

# Names whose use reads attributes that the bytecode does not name.
_DYNAMIC_ACCESS = frozenset(
    {"getattr", "hasattr", "vars", "__dict__", "attrgetter", "__getstate__", "dir", "asdict"}
)
# Names whose use may read attributes of modules without the lookup that `watch_integers` observes.
_DICT_ACCESS = frozenset({"vars", "__dict__", "__getstate__", "__reduce_ex__"})
# Built-in functions whose results may differ between equal objects.
_IDENTITY_FUNCTIONS = frozenset({"id", "hash"})
# Maximum nesting of modules within modules that is followed, as in a.b.c.
_MAX_MODULE_DEPTH = 4


@dataclass(frozen=True)
class ReadableNames:
    """The names that one function can read.

    Attributes:
        globals: names of global variables.
        attributes: names of attributes, and string constants, which may be attribute names or keys.
        imports: names of modules that the function imports.
        any_attribute: whether the function also reads attributes by names computed at run time.
        instance_dict: whether the function may read attributes from the dictionary of an instance.
        identity: whether the function may read the identity of an object.
    """

    globals: tuple[str, ...]
    attributes: frozenset[str]
    imports: tuple[str, ...]
    any_attribute: bool
    instance_dict: bool
    identity: bool


@functools.lru_cache(maxsize=4096)
def readable_names(code: CodeType) -> ReadableNames:
    """Returns the names in a function's bytecode."""
    globals_: dict[str, None] = {}
    attributes = {constant for constant in code.co_consts if isinstance(constant, str)}
    imports: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if not isinstance(name, str):
            continue
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
            globals_[name] = None
        elif "ATTR" in instruction.opname or instruction.opname in ("LOAD_METHOD", "IMPORT_FROM"):
            attributes.add(name)
        elif instruction.opname == "IMPORT_NAME":
            imports[name] = None
    names = {*globals_, *attributes}
    # The method reads the dictionary of its own object. Modules with such a method are never watched.
    of_own_object = code.co_name == "__getattribute__"
    return ReadableNames(
        tuple(globals_),
        frozenset(attributes),
        tuple(imports),
        any_attribute=not _DYNAMIC_ACCESS.isdisjoint(names),
        instance_dict=not (of_own_object or _DICT_ACCESS.isdisjoint(names)),
        identity=not _IDENTITY_FUNCTIONS.isdisjoint(globals_),
    )


@dataclass(eq=False)
class NamespaceEntry:
    """One item of a namespace, such as a global variable.

    Attributes:
        namespace: the dict that holds the item.
        key: the item's key in the namespace.
        label: the item's name in messages.
    """

    namespace: dict[Any, Any]
    key: Any
    label: str

    @property
    def identity(self) -> tuple[int, Any]:
        """A key that is equal for entries of the same item; valid while their namespaces exist."""
        return id(self.namespace), self.key


@dataclass
class PythonReads:
    """Python state that a layer's forward can read, as observed in its traces; it grows with every trace.

    Attributes:
        entries: global variables, attributes of modules, environment variables.
        attributes: names of attributes.
        any_attribute: whether forward may read every attribute of the objects that it can reach.
        instance_dict: whether forward may read attributes from the dictionary of an instance.
        identity: whether forward may read the identity of an object.
        repeatable: whether, as far as is known, a second run computes the same as the first apart from random
            numbers: forward has no side effect that every call repeats, and reads no clock or file.
    """

    entries: dict[tuple[int, Any], NamespaceEntry] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)
    any_attribute: bool = False
    instance_dict: bool = False
    identity: bool = False
    repeatable: bool = True

    def add(self, other: PythonReads) -> bool:
        """Adds everything that ``other`` contains; returns whether anything was new."""
        grows = not (other.entries.keys() <= self.entries.keys() and other.attributes <= self.attributes)
        flags = ("any_attribute", "instance_dict", "identity")
        grows = grows or any(getattr(other, flag) > getattr(self, flag) for flag in flags)
        self.entries |= other.entries
        self.attributes |= other.attributes
        for flag in flags:
            setattr(self, flag, getattr(self, flag) or getattr(other, flag))
        self.repeatable = self.repeatable and other.repeatable
        return grows

    def add_function(self, code: CodeType, namespace: dict[str, Any]) -> list[NamespaceEntry]:
        """Adds everything that one function can read; returns the new entries."""
        names = readable_names(code)
        self.attributes |= names.attributes
        self.any_attribute = self.any_attribute or names.any_attribute
        self.instance_dict = self.instance_dict or names.instance_dict
        self.identity = self.identity or names.identity
        found: list[NamespaceEntry] = []
        for name in names.globals:
            if name in namespace:
                self._add_entry(
                    NamespaceEntry(namespace, name, f"the global variable {name}"), names, found, 0
                )
        for name in names.imports:
            module = sys.modules.get(name)
            if isinstance(module, ModuleType):
                self._add_module(module, names, found, 0)
        return found

    def add_attributes(self, code: CodeType) -> None:
        """Adds the attributes that a standard library function called by forward can read."""
        names = readable_names(code)
        self.attributes |= names.attributes
        self.any_attribute = self.any_attribute or names.any_attribute
        # A copy of a module, by the standard library, holds attributes that were never looked up.
        self.instance_dict = self.instance_dict or "__reduce_ex__" in names.attributes

    def add_environment(self, key: str | None) -> list[NamespaceEntry]:
        """Adds one environment variable, or all of them if ``key`` is None; returns the new entries."""
        data: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
        if key is None:
            entry = NamespaceEntry({"os.environ": data}, "os.environ", "os.environ")
        else:
            encoded = os.environ.encodekey(key)
            entry = NamespaceEntry(data, encoded, f"the environment variable {key}")
        found: list[NamespaceEntry] = []
        self._add_entry(entry, None, found, 0)
        return found

    def _add_entry(
        self, entry: NamespaceEntry, names: ReadableNames | None, found: list[NamespaceEntry], depth: int
    ) -> None:
        if entry.identity not in self.entries:
            self.entries[entry.identity] = entry
            found.append(entry)
        value = entry.namespace.get(entry.key)
        if names is not None and isinstance(value, ModuleType):
            self._add_module(value, names, found, depth)

    def _add_module(
        self, module: ModuleType, names: ReadableNames, found: list[NamespaceEntry], depth: int
    ) -> None:
        if depth == _MAX_MODULE_DEPTH:
            return
        namespace = vars(module)
        for name in sorted(names.attributes & namespace.keys()):
            self._add_entry(
                NamespaceEntry(namespace, name, f"{module.__name__}.{name}"), names, found, depth + 1
            )


_reads_by_layer: weakref.WeakKeyDictionary[nn.Module, PythonReads] = weakref.WeakKeyDictionary()


class _ReadsVersion:
    """Counts how often something was added to any layer's reads."""

    number = 0


def version() -> int:
    """Returns a number that changes whenever something is added to any layer's reads."""
    return _ReadsVersion.number


def reads_of(layer: nn.Module) -> PythonReads | None:
    """Returns the state that a layer's forward reads; None before the layer's first trace."""
    return _reads_by_layer.get(layer)


def reads_of_all(layers: Iterable[nn.Module]) -> list[PythonReads]:
    """Returns the state that each layer's forward reads; empty before the layer's first trace."""
    return [reads_of(layer) or PythonReads() for layer in layers]


def record(layers: Iterable[nn.Module], found: Iterable[PythonReads]) -> bool:
    """Adds the reads observed in one trace to the layers' known reads; returns whether anything was new."""
    grown = False
    for layer, reads in zip(layers, found, strict=True):
        known = _reads_by_layer.get(layer)
        if known is None:
            known = _reads_by_layer[layer] = PythonReads()
            grown = True
        grown = known.add(reads) or grown
    _ReadsVersion.number += grown
    return grown


def mark_unrepeatable(layer: nn.Module) -> None:
    """Records that a second run of a layer may differ from the first."""
    _reads_by_layer.setdefault(layer, PythonReads()).repeatable = False


def are_repeatable(layers: Iterable[nn.Module]) -> bool:
    """Returns whether, as far as is known, a backward may run these layers again (recompute)."""
    found = map(_reads_by_layer.get, layers)
    return all(known is None or known.repeatable for known in found)
