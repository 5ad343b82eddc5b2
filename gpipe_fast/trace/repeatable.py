"""Which layers a backward may run again: those whose forward has no effect that a second run would repeat.

The search reads the bytecode of the modules' forward and of the Python functions that it may call. It knows
what is harmless, and gives up on everything else; the activations of such layers are saved instead. Buffers
and PyTorch's generators may change: they are restored for a recompute. A module that asks for its phase, with
``is_recomputing()`` or ``is_checkpointing()``, expects a second run, and may have any effects.

Bytecode does not tell whose attribute it loads. So an attribute is looked up by name in all modules of the
layers. What attributes and variables hold must be a module of the layers, a tensor, a pure function or an
immutable value, or a container of these. If they hold a tensor or container that could be changed in place,
no function may change any in place.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast._extension import Snapshot
from gpipe_fast.layers.phase import is_checkpointing, is_recomputing
from gpipe_fast.skip import Skippable, pop, stash
from gpipe_fast.torch_private import modules
from gpipe_fast.torch_private.operators import function_names
from gpipe_fast.trace.traceability import HOOKS

# The maximum number of functions and containers to follow, and the maximum size of a container.
_MAX_FOLLOWED, _MAX_ITEMS = 2_000, 100


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CHANGES = re.compile("(STORE|DELETE)_(ATTR|GLOBAL|NAME)|IMPORT_|LOAD_BUILD_CLASS")
_WRITES_ELEMENTS = re.compile("(STORE|DELETE)_(SUBSCR|SLICE)|INPLACE_")
_BUILTINS = _words(
    """abs all any bool bytes callable chr complex dict divmod enumerate filter float format frozenset int
    isinstance issubclass iter len list map max min next object ord pow range repr reversed round set slice
    sorted str sum super tuple type zip"""
)
# Attributes of tensors that change more than elements, or that refer to other objects.
_UNKNOWN_OF_TENSORS = _words(
    """backward data_ptr grad grad_fn names record_stream register_hook register_post_accumulate_grad_hook
    rename_ requires_grad_ retain_grad set_ share_memory_ storage untyped_storage"""
)
_VALUES = (list, dict, tuple, set, frozenset, str, bytes, int, float, complex, slice, range, Exception)
_TORCH_VALUES = (Tensor, torch.Size, torch.dtype, torch.device, torch.finfo, torch.iinfo)
_KNOWN_NAMES = {
    name
    for cls in (*_VALUES, *_TORCH_VALUES)
    for name in dir(cls)
    if not name.startswith("_") and name not in _UNKNOWN_OF_TENSORS
} | _words(
    """__setitem__ buffers children forward get_buffer get_parameter get_submodule modules named_buffers
    named_children named_modules named_parameters parameters"""
)
# Special methods that Python does not call in a forward.
_NOT_IN_FORWARD = ("__annotate__", "__annotate_func__", "__init__")
_CALLS = list(modules.CALLS)
_TABLES = ("_parameters", "_buffers", "_modules")
_GLOBAL_HOOKS = [modules.global_hooks(name) for name in HOOKS]
_IMMUTABLE: set[type] = {type(None), type(...), bool, int, float, complex, str, bytes, range, CodeType}
_IMMUTABLE |= {torch.Generator, torch.dtype, torch.device, torch.layout, torch.memory_format}
_ASKS = _words("is_checkpointing is_recomputing")
# With these, an in-place operator can change a parameter.
_DETACHING = _words("data detach inference_mode no_grad numpy")
# Functions that write running statistics, and methods that change containers.
_WRITES = _words(
    """append batch_norm clear extend insert instance_norm pop popitem remove reverse setdefault sort
    update"""
)
_WRITABLE = frozenset((Tensor, nn.Parameter, list, dict))
_CONTAINERS = _WRITABLE | {tuple, frozenset, torch.Size, functools.partial}
_ABSENT = object()
_UNKNOWN = "?"  # the name of everything that may have other effects


def _pure_values() -> Iterator[Any]:
    """Yields functions and classes of Python, PyTorch and gpipe_fast whose calls have no other effects."""
    yield from (getattr(builtins, name) for name in _BUILTINS)
    yield from (value for name, value in vars(math).items() if not name.startswith("_"))
    yield from (*_TORCH_VALUES, stash, pop, is_checkpointing, is_recomputing)
    yield from (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.autocast)
    yield from (torch.is_tensor, torch.is_floating_point, torch.is_grad_enabled, torch.get_default_dtype)
    yield from (torch.tensor, torch.as_tensor)
    for name in (*function_names(), *torch.functional.__all__):
        if not name.startswith("_") and hasattr(torch, name):
            yield getattr(torch, name)
    for namespace in (F, torch.linalg, torch.fft, torch.special):
        for name, value in vars(namespace).items():
            if not name.startswith("_") and isinstance(value, (FunctionType, BuiltinFunctionType)):
                yield value


_PURE = {id(value): value for value in _pure_values()}


class LayersState:
    """The Python state of layers, as far as their forward depends on it.

    The attributes and buffers of modules that ask for their phase are left out: they may change them.

    Attributes:
        is_repeatable: whether a second run of the layers' forward is known to have no other effects.
        asking: the modules that ask for their phase.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        search = _Search(layers)
        self.is_repeatable, self.asking = search.run(), search.asking
        self._snapshot = Snapshot()
        self._watched: list[tuple[Any, Sequence[Any]]] = []
        if self.is_repeatable:
            for owner, add, *arguments in search.records:
                if owner not in self.asking:
                    getattr(self._snapshot, add)(*arguments)
            watched = {id(value): value for owner, value in search.followed if owner not in self.asking}
            self._watched += [(value, _parts(value)) for value in watched.values()]

    def is_unchanged(self) -> bool:
        """Returns whether repeatable layers still are in this state; takes microseconds."""
        return self._snapshot.unchanged(()) and all(_same(_parts(value), old) for value, old in self._watched)


@functools.lru_cache(maxsize=4096)
def _read(code: CodeType) -> tuple[frozenset[tuple[str, ...]], frozenset[str]]:
    """Returns what the bytecode of a function, and of the functions inside it, loads and changes.

    Returns:
        The global and outer variables, each with the attributes that are loaded from it, and the attributes
        that are loaded from other values. ``__setitem__`` is among these if elements of a tensor or container
        may be changed, ``__setattr__`` if anything else that outlives the call may be.
    """
    paths: list[list[str]] = []
    attributes: set[str] = set()
    for each in nested_code(code):
        path: list[str] | None = None  # of the latest value, if it comes from a variable
        for instruction in dis.get_instructions(each):
            opname, name = instruction.opname, instruction.argval
            is_outer = opname.endswith(("_CLOSURE", "_DEREF")) and name in code.co_freevars
            if opname in ("LOAD_GLOBAL", "LOAD_NAME") or (is_outer and opname.startswith("LOAD_")):
                path = [name]
                paths.append(path)
            elif opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                path.append(name) if path is not None else attributes.add(name)
            elif opname != "EXTENDED_ARG":
                path = None
            if _CHANGES.match(opname) or (is_outer and not opname.startswith("LOAD_")):
                attributes.add("__setattr__")
            is_in_place = opname == "BINARY_OP" and instruction.argrepr.endswith("=")
            if is_in_place or _WRITES_ELEMENTS.match(opname):
                attributes.add("__setitem__")
        # Among them are the names of keyword arguments.
        constants = {name for names in each.co_consts if isinstance(names, tuple) for name in names}
        attributes |= {"__setattr__"} if "max_norm" in constants else set()
        attributes |= {"__setitem__"} if constants & {"out", "inplace"} else set()
    return frozenset(map(tuple, paths)), frozenset(attributes)


def nested_code(code: CodeType) -> Iterator[CodeType]:
    """Yields the code of a function, and of the functions, lambdas and generator expressions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_code(constant)


class _Search:
    """The search for effects of layers.

    What a function does counts for its owner: the module whose method or attribute has led to it.

    Attributes:
        asking: the modules that ask for their phase.
        followed: the functions, containers, and tensors besides parameters and buffers, with their owners.
        records: what to record in a snapshot: the owner, the snapshot's method, and its arguments.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._modules = list(dict.fromkeys(module for layer in layers for module in layer.modules()))
        self._parameters = [p for m in self._modules for p in m._parameters.values() if p is not None]
        buffers = [b for m in self._modules for b in m._buffers.values() if b is not None]
        self._own = {id(each) for each in (*self._modules, *self._parameters, *buffers)}
        # Where attributes are looked up: the modules' tables and the users' classes; the classes of torch.nn.
        self._tables: list[tuple[nn.Module, Mapping[str, Any]]] = []
        self._torch_classes: set[type] = set()
        self._is_known_name: dict[str, bool] = {}
        # By owner, the names of the attributes that it loads, and of what it calls.
        self._names: defaultdict[nn.Module, set[str]] = defaultdict(set)
        self._seen: set[tuple[nn.Module, int]] = set()
        self.asking: set[nn.Module] = set()
        self.followed: list[tuple[nn.Module, Any]] = []
        self.records: list[tuple[Any, ...]] = [(None, "add_container", table) for table in _GLOBAL_HOOKS]

    def run(self) -> bool:
        """Returns whether only harmless effects were found."""
        if any(_GLOBAL_HOOKS) or not all(map(self._add_module, self._modules)):
            return False
        for owner, value in self.followed:  # which grows
            if len(self.followed) > _MAX_FOLLOWED:
                return False
            for part in _parts(value):
                self._use(owner, part)
            if isinstance(value, FunctionType):
                self._read_function(owner, value)
        self.asking = {owner for owner, names in self._names.items() if names & _ASKS}
        names = {name for owner, names in self._names.items() if owner not in self.asking for name in names}
        writes = any(name.endswith("_") or name in _WRITES for name in names)
        # What a recompute does not restore. Autograd guards parameters that need gradients, unless detached.
        is_writable = (
            any(type(value) in _WRITABLE for owner, value in self.followed if owner not in self.asking)
            or any(not parameter.requires_grad for parameter in self._parameters)
            or (bool(self._parameters) and not names.isdisjoint(_DETACHING))
        )
        return _UNKNOWN not in names and not (writes and is_writable)

    def _add_module(self, module: nn.Module) -> bool:
        """Adds the functions that a call of a module runs; returns False if they are not known."""
        own, cls = vars(module), type(module)
        bases = [base for base in cls.__mro__ if not _is_of_torch_nn(base)]
        calls = [cls.__call__, cls._call_impl, cls._wrapped_call_impl]
        if any(own.get(name) for name in (*HOOKS, "forward", "_compiled_call_impl")) or calls != _CALLS:
            return False
        if any(map(_is_of_torch, bases)) or not isinstance(cls.forward, FunctionType):
            return False
        tables = {name: own[name] for name in (*_TABLES, *HOOKS) if name in own}
        for name, table in tables.items():
            self.records.append((module if name == "_buffers" else None, "add_container", table))
        self.records += [(module, "add_class", base) for base in bases]
        self.records += [(module, "add_attributes", module, True), (None, "add_attributes", module, False)]
        self.records.append((None, "add_dict_items", own, ["training"], False))
        self._tables += [(module, table) for table in (own, *tables.values(), *map(vars, bases))]
        self._torch_classes.update(set(cls.__mro__).difference(bases, [object]))
        if own.get("inplace"):
            self._names[module].add("__setitem__")
        if not bases:
            for value in filter(callable, own.values()):
                self._use(module, value)
        elif cls.forward is not Skippable.forward:  # which runs its submodule
            self._follow(module, cls.forward)
            for name, value in [item for base in bases for item in vars(base).items()]:
                is_special = name.startswith("__") and name.endswith("__") and name not in _NOT_IN_FORWARD
                if is_special and isinstance(value, FunctionType):
                    self._follow(module, value)
        return True

    def _follow(self, owner: nn.Module, value: Any) -> None:
        if (owner, id(value)) not in self._seen:
            self._seen.add((owner, id(value)))
            self.followed.append((owner, value))

    def _read_function(self, owner: nn.Module, function: FunctionType) -> None:
        """Follows what a function loads, and notes what it may change."""
        paths, attributes = _read(function.__code__)
        for name, *names in paths:
            if name not in function.__code__.co_freevars:  # whose contents are parts of the function
                namespace: dict[str, Any] = function.__globals__
                value = namespace.get(name, vars(builtins).get(name, _ABSENT))
                self.records.append((owner, "add_dict_items", namespace, [name], False))
                while names and isinstance(value, ModuleType):
                    namespace, name = vars(value), names.pop(0)
                    value = namespace.get(name, _ABSENT)
                    self.records.append((owner, "add_dict_items", namespace, [name], False))
                self._use(owner, value)
            attributes = attributes.union(names)
        known = {name for name in attributes if self._is_known(name)}
        self._names[owner] |= attributes if known == attributes else {*attributes, _UNKNOWN}

    def _use(self, owner: nn.Module, value: Any) -> None:
        """Follows a value that is neither immutable, nor part of the layers, nor pure if called."""
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, (classmethod, staticmethod)):
            value = value.__func__
        elif isinstance(value, MethodType):
            module, function = value.__self__, value.__func__
            if isinstance(module, nn.Module) and id(module) in self._own:
                owner, value = module, function
        if id(value) in self._own or type(value) in _IMMUTABLE or _is_harmless_class(value):
            return
        if id(value) in _PURE:
            self._names[owner].add(getattr(value, "__name__", ""))
        elif _is_followed(value):
            self._follow(owner, value)
        else:
            self._names[owner].add(_UNKNOWN)

    def _is_known(self, name: str) -> bool:
        """Returns whether an attribute of this name is harmless; follows those of modules."""
        if name not in self._is_known_name:
            found = [(module, table[name]) for module, table in self._tables if name in table]
            is_users = bool(found) and not any(name in vars(cls) for cls in self._torch_classes)
            self._is_known_name[name] = is_users or name in _KNOWN_NAMES
            for module, value in found:
                self._use(module, value)
        return self._is_known_name[name]


def _is_of_torch(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] == "torch"


def _is_of_torch_nn(cls: type) -> bool:
    name = cls.__module__
    return cls is object or (name.startswith("torch.nn.") and not name.startswith("torch.nn.parallel"))


def _is_harmless_class(value: Any) -> bool:
    """Returns whether a value is a class of torch.nn, or an exception without code of its own."""
    if not isinstance(value, type):
        return False
    is_plain_exception = issubclass(value, BaseException) and not isinstance(value.__init__, FunctionType)
    return is_plain_exception or _is_of_torch_nn(value)


def _is_followed(value: Any) -> bool:
    if isinstance(value, FunctionType):
        return not _is_of_torch(value)
    return type(value) in _CONTAINERS and len(_parts(value)) <= _MAX_ITEMS


def _parts(value: Any) -> Sequence[Any]:
    """Returns what a function or a container consists of, and the version of a tensor."""
    if isinstance(value, FunctionType):
        constants = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        # Methods with super() have the class in a cell.
        return (
            value.__code__,
            *constants,
            *[content_of(cell) for name, cell in cells if name != "__class__"],
        )
    if isinstance(value, Tensor):
        return () if value.is_inference() else (value._version,)
    if type(value) is functools.partial:
        return (value.func, *value.args, *value.keywords.values())
    return (*value.keys(), *value.values()) if type(value) is dict else tuple(value)


def content_of(cell: CellType) -> Any:
    """Returns the value of a closure's variable; if it has none yet, an object that no variable has."""
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _ABSENT


def _same(parts: Sequence[Any], others: Sequence[Any]) -> bool:
    pairs = zip(parts, others, strict=False)
    return len(parts) == len(others) and all(
        a is b or (type(a) is type(b) is int and a == b) for a, b in pairs
    )
