"""What a layer's forward reads from Python, beside its module: global variables and attributes, by name.

A trace runs forward once, so whatever it reads becomes a constant. While it runs, every Python function that
takes part is looked at: its bytecode names the global variables and attributes that it can read. From then on
these are guarded; see `fingerprint`.
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

# Builtins that read attributes by names which the bytecode does not show.
_BY_NAME = frozenset(
    {"getattr", "hasattr", "vars", "__dict__", "attrgetter", "__getstate__", "dir", "asdict"}
)
# Modules within modules that are looked into, as in a.b.c.
_DEPTH = 4


@dataclass(frozen=True)
class Names:
    """What one function can read.

    Attributes:
        globals: names of global variables.
        attributes: names of attributes, and strings that may be keys or names of some.
        imports: modules that are imported when the function runs.
        any_attribute: whether it also reads attributes by names computed at run time.
    """

    globals: tuple[str, ...]
    attributes: frozenset[str]
    imports: tuple[str, ...]
    any_attribute: bool


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType) -> Names:
    """What the bytecode of a function shows."""
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
    by_name = not _BY_NAME.isdisjoint((*globals_, *attributes))
    return Names(tuple(globals_), frozenset(attributes), tuple(imports), by_name)


@dataclass(eq=False)
class Entry:
    """One item of a namespace, such as a global variable.

    Attributes:
        namespace: the dict that holds it.
        key: its key there.
        label: what messages call it.
    """

    namespace: dict[Any, Any]
    key: Any
    label: str

    @property
    def identity(self) -> tuple[int, Any]:
        """The same for two entries that are one item; only while both exist."""
        return id(self.namespace), self.key


@dataclass
class Reads:
    """What forward was seen to read; it grows with every trace.

    Attributes:
        entries: global variables, attributes of modules, environment variables.
        attributes: names of attributes.
        any_attribute: whether it reads any attribute of what it can reach.
        repeatable: whether a second run does what the first one did, but for random numbers, as far as is
            known: nothing outside of the layer changes with every call.
    """

    entries: dict[tuple[int, Any], Entry] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)
    any_attribute: bool = False
    repeatable: bool = True

    def add(self, other: Reads) -> bool:
        """Takes in what another one has; returns whether anything was new."""
        grows = not (other.entries.keys() <= self.entries.keys() and other.attributes <= self.attributes)
        grows = grows or other.any_attribute > self.any_attribute
        self.entries |= other.entries
        self.attributes |= other.attributes
        self.any_attribute = self.any_attribute or other.any_attribute
        self.repeatable = self.repeatable and other.repeatable
        return grows

    def add_function(self, code: CodeType, namespace: dict[str, Any]) -> list[Entry]:
        """Takes in what one function can read; returns the entries that are new."""
        names = names_of(code)
        self.attributes |= names.attributes
        self.any_attribute = self.any_attribute or names.any_attribute
        found: list[Entry] = []
        for name in names.globals:
            if name in namespace:
                self._add_entry(Entry(namespace, name, f"the global variable {name}"), names, found, 0)
        for name in names.imports:
            module = sys.modules.get(name)
            if isinstance(module, ModuleType):
                self._add_module(module, names, found, 0)
        return found

    def add_attributes(self, code: CodeType) -> None:
        """Takes in the attributes that a function of the standard library can read on behalf of forward."""
        names = names_of(code)
        self.attributes |= names.attributes
        self.any_attribute = self.any_attribute or names.any_attribute

    def add_environment(self, key: str | None) -> list[Entry]:
        """Takes in one environment variable, or all of them."""
        data: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
        if key is None:
            entry = Entry({"os.environ": data}, "os.environ", "os.environ")
        else:
            encoded = os.environ.encodekey(key)
            entry = Entry(data, encoded, f"the environment variable {key}")
        found: list[Entry] = []
        self._add_entry(entry, None, found, 0)
        return found

    def _add_entry(self, entry: Entry, names: Names | None, found: list[Entry], depth: int) -> None:
        if entry.identity not in self.entries:
            self.entries[entry.identity] = entry
            found.append(entry)
        value = entry.namespace.get(entry.key)
        if names is not None and isinstance(value, ModuleType):
            self._add_module(value, names, found, depth)

    def _add_module(self, module: ModuleType, names: Names, found: list[Entry], depth: int) -> None:
        if depth == _DEPTH:
            return
        namespace = vars(module)
        for name in sorted(names.attributes & namespace.keys()):
            self._add_entry(Entry(namespace, name, f"{module.__name__}.{name}"), names, found, depth + 1)


_known: weakref.WeakKeyDictionary[nn.Module, Reads] = weakref.WeakKeyDictionary()


class _Version:
    """How often a layer was found to read more than was known."""

    number = 0


def version() -> int:
    """Changes whenever more becomes known about any layer."""
    return _Version.number


def reads_of(layer: nn.Module) -> Reads | None:
    """What a layer's forward was seen to read; None before its first trace."""
    return _known.get(layer)


def note(layers: Iterable[nn.Module], found: Iterable[Reads]) -> bool:
    """Remembers what forwards were seen to read; returns whether anything was new."""
    grown = False
    for layer, reads in zip(layers, found, strict=True):
        known = _known.get(layer)
        if known is None:
            known = _known[layer] = Reads()
            grown = True
        grown = known.add(reads) or grown
    _Version.number += grown
    return grown


def cannot_repeat(layer: nn.Module) -> None:
    """Remembers that a second run of a layer does something else than the first one."""
    _known.setdefault(layer, Reads()).repeatable = False


def are_repeatable(layers: Iterable[nn.Module]) -> bool:
    """Whether a backward may run layers again, as far as is known."""
    found = map(_known.get, layers)
    return all(known is None or known.repeatable for known in found)
