"""The conditions under which a captured graph holds: Dynamo's guards, and what they miss.

The guards compare numbers by ``==`` and other objects by their class. But ``1 == 1.0``, and a forward may ask
which object it has got (``self.mode is AUTO``), or iterate over a set. Nor do they notice patched classes,
functions with new code, and changes of the environment.
"""

from __future__ import annotations

import abc
import builtins
import enum
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, KeysView, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_fast._extension import Snapshot

if TYPE_CHECKING:
    from gpipe_fast.trace.dynamo import Guards

IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device)

# Compared by Dynamo's guards, or by callers.
_COMPARED = (Tensor, nn.Module, ModuleType, FunctionType, MethodType, BuiltinFunctionType, enum.Enum)
_CONTAINERS = (list, dict, set, tuple, frozenset)
_TORCH = os.path.dirname(torch.__file__)
_ENVIRONMENT: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
# Modules' own tables, of hooks, parameters, buffers or modules; and those of hooks on all modules.
_OWN_TABLES = "|".join(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
_TABLE = re.compile(rf"(\b({_OWN_TABLES})|^G\[.*\]\._global_\w*hooks)('\])?$")
# A layer, or a module in it; and its attribute.
_ATTRIBUTE = re.compile(
    r"(?P<module>L\['layer'\](\._modules\['[^']*'\])*)(?P<attribute>\.(\w+|__dict__\['\w+'\]))?"
)


class Read(NamedTuple):
    """A place that a forward has read.

    Attributes:
        name: an expression for it.
        code: the expression, compiled.
        scope: the global variables of the expression.
        with_keys: whether a forward may have looked for an absent key of it.
        is_shared: whether it holds a function that another place holds, too.
    """

    name: str
    code: CodeType
    scope: dict[str, Any]
    with_keys: bool
    is_shared: bool = False

    def value(self, layer: nn.Module | None) -> Any:
        """Returns the value for a layer."""
        return eval(self.code, {"L": {"layer": layer}, "G": self.scope})


class Conditions:
    """The conditions under which a captured graph holds: Dynamo's guards, and what they miss.

    Attributes:
        guards: the guards.
    """

    def __init__(
        self, guards: Guards, layer: nn.Module, constants: Sequence[Callable[[nn.Module], Any]] = ()
    ) -> None:
        """Notes what the guards miss.

        Args:
            guards: the guards.
            layer: the layer whose forward was captured.
            constants: functions that return the tensors that the graph contains, of a layer; no other tensor
                may take their place. They are kept: weak references make `torch.utils.swap_tensors` fail.
        """
        self.guards = guards
        self._is_unchanged = _unguarded_state(guards)
        values = [
            (read, value)
            for read in guards.reads
            if not _TABLE.search(read.name)
            # Some expressions make a new object, such as a copy of a class's ``__dict__``.
            and (value := read.value(layer)) is read.value(layer)
        ]
        num_numbered = sum(_is_numbered(read, value) for read, value in values)
        self._reads = [
            read
            for read, value in values
            if (num_numbered > 1 and _is_numbered(read, value))
            or _exact(value, read.with_keys) is not None
            or any(_sentinels_of(value))
        ]
        self._volatile = [read for read in self._reads if not is_attribute(read, layer)]
        self._constants = constants
        self._known = [self._of(reads, layer) for reads in (self._reads, self._volatile)]

    def surroundings_hold(self) -> bool:
        """Returns whether what is outside of layers is as it was."""
        return self.guards.ambient(_NO_LAYER) and self._is_unchanged()

    def hold_for(self, scope: Mapping[str, Any], same_attributes: bool = False) -> bool:
        """Returns whether ``scope["layer"]`` itself passes.

        Args:
            scope: the variables of the guards.
            same_attributes: whether it passed before, and its modules have the same attributes since.
        """
        if not (same_attributes and self.guards.layer_follows) and not self.guards.layer(scope):
            return False
        reads = self._volatile if same_attributes else self._reads
        if not reads and not self._constants:
            return True
        try:
            return self._of(reads, scope["layer"]) == self._known[same_attributes]
        except Exception:  # an attribute is gone
            return False

    def _of(self, reads: Sequence[Read], layer: nn.Module) -> list[Hashable]:
        numbers: dict[int, int] = {}  # which places hold the same object
        found: list[Hashable] = []
        for read in reads:
            value = read.value(layer)
            same = numbers.setdefault(id(value), len(numbers)) if _is_numbered(read, value) else None
            sentinels = tuple(map(_Same, _sentinels_of(value)))
            found.append((same, _exact(value, read.with_keys), sentinels))
        for constant in self._constants:
            tensor = constant(layer)
            found.append((_Same(tensor), getattr(tensor, "_cdata", None)))
        return found


def scope_of(layer: nn.Module) -> Mapping[str, Any]:
    """Returns the variables to which guards refer."""
    return {"layer": layer, "args": (), "kwargs": {}, "popped": ()}


# What conditions that are not on a layer are checked with.
_NO_LAYER = scope_of(nn.Identity())


class _Same:
    """An object, compared by identity."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _is_object(value: object) -> bool:
    """Returns whether a value is an instance of a user's class, of which guards compare the class alone."""
    if type(value) is object:
        return True
    is_users = type(value).__module__.partition(".")[0] not in ("builtins", "torch", "functools", "triton")
    return is_users and not isinstance(value, (*IMMUTABLE, *_COMPARED, *_CONTAINERS))


def _is_sentinel(value: object) -> bool:
    """Returns whether nothing but its identity can tell such an instance from another of its class."""
    return _is_object(value) and not getattr(value, "__dict__", None) and not hasattr(value, "__slots__")


def _is_numbered(read: Read, value: object) -> bool:
    """Returns whether a forward may ask if two such values are the same object."""
    return read.is_shared or isinstance(value, _CONTAINERS) or _is_object(value)


def _sentinels_of(value: Any) -> Iterator[object]:
    """Yields a value and its attributes, as far as they are sentinels."""
    if _is_sentinel(value):
        yield value
    elif isinstance(value, nn.Module) or (_is_object(value) and hasattr(value, "__dict__")):
        yield from filter(_is_sentinel, vars(value).values())


def _exact(value: Any, with_keys: bool = False) -> Hashable:
    """Returns what tells equal values apart; None if the guards do."""
    if with_keys and isinstance(value, dict):
        return tuple(map(_in_container, value))
    if isinstance(value, (float, complex)):
        return repr(value) if value == 0 else None
    if isinstance(value, (tuple, frozenset)):
        return (type(value), *map(_in_container, value)) if value else None
    if isinstance(value, KeysView):
        return tuple(map(_in_container, value))
    if isinstance(value, (OrderedDict, set)):
        return tuple(map(_in_container, value)) if len(value) > 1 else None
    if isinstance(value, FunctionType):  # guards find its global variables by the name of their module
        module = sys.modules.get(value.__globals__.get("__name__", ""))
        return None if module is not None and vars(module) is value.__globals__ else _Same(value.__globals__)
    return abc.get_cache_token() if isinstance(value, abc.ABCMeta) else None


def _in_container(value: Any) -> Hashable:
    # Guards on a tuple compare the very objects in it.
    exact = tuple(map(_in_container, value)) if isinstance(value, (list, set)) else _exact(value)
    return (type(value), exact if exact is not None or not isinstance(value, IMMUTABLE) else value)


def is_attribute(read: Read, layer: nn.Module) -> bool:
    """Returns whether a value cannot change unless an attribute or a table of a layer's modules does."""
    found = _ATTRIBUTE.fullmatch(read.name)
    if found is None:
        return False
    module = eval(found["module"], {"L": {"layer": layer}})
    if any(vars(cls).get("__slots__") for cls in type(module).__mro__):  # beside its ``__dict__``
        return False
    return not found["attribute"] or bool(_TABLE.search(read.name)) or is_immutable(read.value(layer))


def is_immutable(value: Any) -> bool:
    """Returns whether a value is a constant, or a tuple or frozen set of constants."""
    if type(value) in (tuple, frozenset, torch.Size):
        return all(map(is_immutable, value))
    return type(value) in IMMUTABLE


def _unguarded_state(guards: Guards) -> Callable[[], bool]:
    """Returns a function that tells whether the state outside of layers that guards miss is as it is now."""
    snapshot = Snapshot()
    functions: list[tuple[FunctionType, CodeType, Any, Any]] = []
    called = set(guards.functions)
    names = {name for each in guards.code if each.co_filename.startswith(_TORCH) for name in each.co_names}
    snapshot.add_dict_items(vars(torch), [name for name in names if callable(vars(torch).get(name))], False)
    snapshot.add_class(torch.Tensor)
    classes = (*guards.classes, *map(type, guards.classes))
    for cls in dict.fromkeys(base for own in classes for base in own.__mro__):
        if _is_python_class(cls):
            snapshot.add_class(cls)
            run = [each for each in _functions_of(cls) if each.__code__ in guards.code]
            functions += [(each, each.__code__, each.__defaults__, each.__kwdefaults__) for each in run]
            called.update(run)
    for function in called:
        shadowed = vars(builtins).keys() & set(function.__code__.co_names) - function.__globals__.keys()
        snapshot.add_dict_items(function.__globals__, shadowed, False)
    # By value: PyTorch stores some variables again.
    environment = dict(_ENVIRONMENT) if guards.reads_environment else None

    def is_unchanged() -> bool:
        if not snapshot.unchanged(()) or (environment is not None and environment != _ENVIRONMENT):
            return False
        for function, own_code, defaults, keyword_defaults in functions:
            if (
                function.__code__ is not own_code
                or function.__defaults__ is not defaults
                or function.__kwdefaults__ is not keyword_defaults
            ):
                return False
        return True

    return is_unchanged


_HEAP_TYPE = 1 << 9


def _is_python_class(cls: type) -> bool:
    """Returns whether a class is written in Python, and not a class of tensors."""
    return bool(cls.__flags__ & _HEAP_TYPE) and not cls.__module__.startswith(("builtins", "torch._C"))


def _functions_of(cls: type) -> Iterator[FunctionType]:
    for value in vars(cls).values():
        if isinstance(value, property):
            candidates = [value.fget, value.fset]
        else:
            candidates = [getattr(value, "__func__", value)]
        yield from (each for each in candidates if isinstance(each, FunctionType))
