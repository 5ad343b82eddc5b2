"""Which layers a backward may run again: those whose forward has no effect that a second run would repeat.

The test reads the bytecode of the modules' forward and of the Python functions that it may call. It knows
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
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from gpipe_fast._extension import Snapshot
from gpipe_fast.layers.phase import is_checkpointing, is_recomputing
from gpipe_fast.layers.skip import Skippable, pop, stash
from gpipe_fast.trace.traceability import HOOKS

# The maximum number of functions to read.
_MAX_FUNCTIONS = 1_000


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_IMPURE = _words(
    """DELETE_ATTR DELETE_GLOBAL DELETE_NAME IMPORT_FROM IMPORT_NAME IMPORT_STAR LOAD_BUILD_CLASS STORE_ATTR
    STORE_GLOBAL STORE_NAME"""
)
_LOADS_ATTRIBUTE = _words("LOAD_ATTR LOAD_METHOD LOAD_SUPER_ATTR")
_LOADS_GLOBAL = _words("LOAD_GLOBAL LOAD_NAME")
_LOADS_CELL = _words("LOAD_CLOSURE LOAD_DEREF")
_CHANGES_CELL = _words("DELETE_DEREF STORE_DEREF")
_WRITES_ELEMENTS = _words("DELETE_SUBSCR STORE_SLICE STORE_SUBSCR")

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
_KNOWN_NAMES = {
    name
    for cls in (*_VALUES, Tensor, torch.Size, torch.dtype, torch.device, torch.finfo, torch.iinfo)
    for name in dir(cls)
    if not name.startswith("_") and name not in _UNKNOWN_OF_TENSORS
}
# Methods of the classes of torch.nn.
_METHODS = _KNOWN_NAMES | _words(
    """buffers children forward get_buffer get_parameter get_submodule modules named_buffers named_children
    named_modules named_parameters parameters"""
)
# Methods that Python calls by itself, but not in a forward.
_NOT_IN_FORWARD = _words(
    """__class_getitem__ __copy__ __deepcopy__ __del__ __delattr__ __dir__ __getstate__ __init__
    __init_subclass__ __new__ __reduce__ __reduce_ex__ __repr__ __setattr__ __setstate__ __str__"""
)
_CALLS = ("__call__", "_call_impl", "_wrapped_call_impl")
_TABLES = ("_parameters", "_buffers", "_modules")
_GLOBAL_HOOKS = [getattr(nn_module, f"_global{name}") for name in HOOKS]
_IMMUTABLE = frozenset(
    [
        *(type(None), bool, int, float, complex, str, bytes, range, type(...), torch.Generator),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    ]
)
_PHASE_NAMES = _words("is_checkpointing is_recomputing")
# With these, an in-place operator can change a parameter.
_DETACHING = _words("data detach inference_mode no_grad numpy")
# Functions that write running statistics, and methods that change containers.
_WRITING = _words(
    """append batch_norm clear extend insert instance_norm pop popitem remove reverse setdefault sort
    update"""
)
_WRITABLE = frozenset((Tensor, nn.Parameter, list, dict))
_CONTAINERS = _WRITABLE | {tuple, frozenset, torch.Size, functools.partial}
# The maximum size of a container that is searched.
_MAX_ITEMS = 100
_UNKNOWN = object()


def _pure_values() -> Iterator[Any]:
    """Yields functions and classes of Python, PyTorch and gpipe_fast whose calls have no other effects."""
    yield from (getattr(builtins, name) for name in _BUILTINS)
    yield from (value for name, value in vars(math).items() if not name.startswith("_"))
    yield from (Tensor, torch.Size, torch.dtype, torch.device, torch.finfo, torch.iinfo, stash, pop)
    yield from (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.autocast)
    yield from (torch.is_tensor, torch.is_floating_point, torch.is_grad_enabled, torch.get_default_dtype)
    yield from (torch.tensor, torch.as_tensor)
    for name in (*dir(torch._C._VariableFunctions), *torch.functional.__all__):
        if not name.startswith("_") and hasattr(torch, name):
            yield getattr(torch, name)
    for namespace in (F, torch.linalg, torch.fft, torch.special):
        for name, value in vars(namespace).items():
            if not name.startswith("_") and isinstance(value, (FunctionType, BuiltinFunctionType)):
                yield value


_PURE = {id(value): value for value in _pure_values()}


class LayersState:
    """The Python state of layers, as far as their forward depends on it.

    Attributes:
        is_repeatable: whether a second run of the layers' forward is known to have no other effects.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        search = _Search(layers)
        self.is_repeatable = search.run()
        self._snapshot = Snapshot()
        self._checks = search.record(self._snapshot) if self.is_repeatable else []

    def is_unchanged(self) -> bool:
        """Returns whether repeatable layers still are in this state; takes microseconds."""
        return self._snapshot.unchanged(()) and all(check() for check in self._checks)


def are_repeatable(layers: Iterable[nn.Module]) -> bool:
    """Returns whether a second run of the layers' forward is known to have no other effects."""
    return LayersState(layers).is_repeatable


class _Code(NamedTuple):
    """What the bytecode of a function, and of the functions inside it, says.

    Attributes:
        is_pure: whether no instruction has an effect that outlives the call, except on elements.
        writes: whether an instruction may change elements of a tensor or a container.
        variables: the global and outer variables, each with the attributes that are loaded from it.
        attributes: the attributes that are loaded from other values.
    """

    is_pure: bool
    writes: bool
    variables: frozenset[tuple[str, ...]]
    attributes: frozenset[str]

    def names(self) -> frozenset[str]:
        return self.attributes.union(*self.variables)


@functools.lru_cache(maxsize=4096)
def _read(code: CodeType) -> _Code:
    is_pure, writes = True, False
    paths: list[list[str]] = []
    attributes: set[str] = set()
    for each in _nested(code):
        path: list[str] | None = None  # of the latest value, if it comes from a variable
        for instruction in dis.get_instructions(each):
            name, argument = instruction.opname, instruction.argval
            if name == "EXTENDED_ARG":
                continue
            is_outer = argument in code.co_freevars if name in _LOADS_CELL | _CHANGES_CELL else False
            if name in _LOADS_GLOBAL or (name in _LOADS_CELL and is_outer):
                path = [argument]
                paths.append(path)
            elif name not in _LOADS_ATTRIBUTE:
                path = None
            elif path is not None:
                path.append(argument)
            else:
                attributes.add(argument)
            is_pure &= name not in _IMPURE and not (name in _CHANGES_CELL and is_outer)
            writes |= name in _WRITES_ELEMENTS or name.startswith("INPLACE_")
            writes |= name == "BINARY_OP" and instruction.argrepr.endswith("=")
        # Among them are the names of keyword arguments.
        constants = {name for names in each.co_consts if isinstance(names, tuple) for name in names}
        is_pure &= "max_norm" not in constants
        writes |= not constants.isdisjoint(("out", "inplace"))
    return _Code(is_pure, writes, frozenset(map(tuple, paths)), frozenset(attributes))


def _nested(code: CodeType) -> Iterator[CodeType]:
    """Yields the code of a function, and of the functions, lambdas and generator expressions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


class _Search:
    """The search for effects of layers.

    What a function does counts for its owner: the module whose method or attribute has led to it.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._modules = list(dict.fromkeys(module for layer in layers for module in layer.modules()))
        self._parameters = [p for m in self._modules for p in m._parameters.values() if p is not None]
        buffers = [b for m in self._modules for b in m._buffers.values() if b is not None]
        self._own = {id(each) for each in (*self._modules, *self._parameters, *buffers)}
        self._impure: set[nn.Module] = set()
        self._asking: set[nn.Module] = set()
        self._is_known_by_name: dict[str, bool] = {}
        self._functions: dict[tuple[nn.Module, FunctionType], _Code] = {}
        self._pending: deque[tuple[nn.Module, FunctionType]] = deque()
        self._variables: list[tuple[nn.Module, dict[str, Any], str]] = []
        # Tensors besides parameters and buffers, and containers; by owner and address.
        self._writable: dict[tuple[nn.Module, int], Any] = {}
        self._is_known_container: dict[tuple[nn.Module, int], bool] = {}
        self._calls: set[str] = set()  # the names of PyTorch's functions

    def run(self) -> bool:
        """Returns whether only harmless effects were found."""
        if any(_GLOBAL_HOOKS) or not all(map(self._add_module, self._modules)):
            return False
        while self._pending and len(self._functions) < _MAX_FUNCTIONS:
            owner, function = self._pending.popleft()
            if not self._is_pure(owner, function):
                self._impure.add(owner)
        return not self._pending and self._impure <= self._asking and not self._may_write()

    def record(self, snapshot: Snapshot) -> list[Callable[[], bool]]:
        """Records the state in a snapshot, and returns checks of what a snapshot cannot record.

        The attributes and buffers of modules that ask for their phase are left out: they may change them.
        """
        for table in _GLOBAL_HOOKS:
            snapshot.add_container(table)
        for module in self._modules:
            asks, own = module in self._asking, vars(module)
            snapshot.add_attributes(module, not asks)
            snapshot.add_dict_items(own, ["training"], False)
            for name in (*_TABLES, *HOOKS):
                if name in own and not (asks and name == "_buffers"):
                    snapshot.add_container(own[name])
            for cls in type(module).__mro__:
                if _is_users(cls) and not asks:
                    snapshot.add_class(cls)
        for owner, namespace, name in self._variables:
            if owner not in self._asking:
                snapshot.add_dict_items(namespace, [name], False)
        functions = dict.fromkeys(f for owner, f in self._functions if owner not in self._asking)
        writable = [value for (owner, _), value in self._writable.items() if owner not in self._asking]
        return [*map(_same_function, functions), *map(_same_elements, writable)]

    def _may_write(self) -> bool:
        """Returns whether a tensor or container may be changed in place that a recompute does not restore."""
        codes = [code for (owner, _), code in self._functions.items() if owner not in self._asking]
        names = self._calls.union(*(code.names() for code in codes))
        writes = (
            any(code.writes for code in codes)
            or any(getattr(module, "inplace", False) for module in self._modules)
            or any(name.endswith("_") or name in _WRITING for name in names)
        )
        # Autograd keeps in-place operators from a parameter that needs a gradient.
        writable = bool(self._parameters) and not names.isdisjoint(_DETACHING)
        writable |= any(not parameter.requires_grad for parameter in self._parameters)
        writable |= any(owner not in self._asking for owner, _ in self._writable)
        return writes and writable

    def _add_module(self, module: nn.Module) -> bool:
        """Adds the functions that a call of a module runs; returns False if they are not known."""
        own, cls = vars(module), type(module)
        if any(own.get(table) for table in HOOKS) or "forward" in own or own.get("_compiled_call_impl"):
            return False
        if any(getattr(cls, name) is not getattr(nn.Module, name) for name in _CALLS):
            return False
        if cls.forward is Skippable.forward:  # it runs its submodule
            return True
        if all(map(_is_of_torch_nn, cls.__mro__)):
            functions = [value for value in own.values() if callable(value) and id(value) not in self._own]
            known = [self._is_known(module, function) for function in functions]
            return all(known)
        if not isinstance(cls.forward, FunctionType):
            return False
        self._add(module, cls.forward)
        for base in filter(_is_users, cls.__mro__):
            for name, value in vars(base).items():
                if _is_special(name) and name not in _NOT_IN_FORWARD and isinstance(value, FunctionType):
                    self._add(module, value)
        return all(_is_users(base) or _is_of_torch_nn(base) for base in cls.__mro__)

    def _add(self, owner: nn.Module, function: FunctionType) -> None:
        if (owner, function) not in self._functions:
            self._functions[owner, function] = _read(function.__code__)
            self._pending.append((owner, function))

    def _is_pure(self, owner: nn.Module, function: FunctionType) -> bool:
        """Returns whether a function is pure, provided that those are which it adds to the search."""
        code = self._functions[owner, function]
        values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        attributes = set(code.attributes)
        for path in code.variables:
            value, following = self._follow(owner, function, path)
            values.append(value)
            attributes.update(following)
        if not attributes.isdisjoint(_PHASE_NAMES):
            self._asking.add(owner)
        known = [self._is_known(owner, value) for value in values]
        known += [self._is_known_name(name) for name in attributes]
        return code.is_pure and all(known)

    def _follow(
        self, owner: nn.Module, function: FunctionType, path: Sequence[str]
    ) -> tuple[Any, Sequence[str]]:
        """Returns the value of a variable, here or in a Python module, and the attributes loaded from it."""
        first, *names = path
        if first == "__class__":  # of super()
            return None, names
        if first in function.__code__.co_freevars:
            return _contents(function)[first], names
        namespace: dict[str, Any] = function.__globals__
        self._variables.append((owner, namespace, first))
        value = namespace.get(first, vars(builtins).get(first, _UNKNOWN))
        while names and isinstance(value, ModuleType):
            namespace = vars(value)
            self._variables.append((owner, namespace, names[0]))
            value = namespace.get(names.pop(0), _UNKNOWN)
        return value, names

    def _is_known(self, owner: nn.Module, value: Any) -> bool:
        """Returns whether a value is immutable, belongs to the layers, or is pure if called."""
        if value is is_recomputing or value is is_checkpointing:
            self._asking.add(owner)
            return True
        if id(value) in _PURE:
            self._calls.add(getattr(value, "__name__", ""))
            return True
        if id(value) in self._own or type(value) in _IMMUTABLE:
            return True
        if type(value) in _WRITABLE:
            self._writable[owner, id(value)] = value
        if type(value) in _CONTAINERS:
            return self._is_container_known(owner, value)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return id(value.__self__) in self._own and self._is_known(value.__self__, value.__func__)
        if isinstance(value, FunctionType) and not _is_of_torch(value):
            self._add(owner, value)
            return True
        return isinstance(value, type) and (_is_of_torch_nn(value) or _is_plain_exception(value))

    def _is_container_known(self, owner: nn.Module, value: Any) -> bool:
        key = (owner, id(value))
        if key not in self._is_known_container:
            self._is_known_container[key] = False  # if it contains itself
            items = _items(value)
            self._is_known_container[key] = len(items) <= _MAX_ITEMS and all(
                self._is_known(owner, each) for each in items
            )
        return self._is_known_container[key]

    def _is_known_name(self, name: str) -> bool:
        """Returns whether an attribute of this name is harmless, to whatever it belongs."""
        if name not in self._is_known_by_name:
            found = [
                self._is_known_attribute(module, cls, name, value)
                for module in self._modules
                for cls, namespace in _namespaces(module)
                if (value := namespace.get(name, _UNKNOWN)) is not _UNKNOWN
            ]
            self._is_known_by_name[name] = all(found) and (bool(found) or name in _KNOWN_NAMES)
        return self._is_known_by_name[name]

    def _is_known_attribute(self, module: nn.Module, cls: type | None, name: str, value: Any) -> bool:
        """Returns whether an attribute of a module, or of one of its classes, is harmless."""
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, (classmethod, staticmethod)):
            value = value.__func__
        is_method_of_torch = cls is not None and not _is_users(cls) and isinstance(value, FunctionType)
        return name in _METHODS if is_method_of_torch else self._is_known(module, value)


def _namespaces(module: nn.Module) -> Iterator[tuple[type | None, Mapping[str, Any]]]:
    """Yields the tables in which attributes of a module are found, with the class if it is a class's."""
    for table in _TABLES:
        yield None, vars(module)[table]
    yield None, vars(module)
    for cls in type(module).__mro__[:-1]:
        yield cls, vars(cls)


def _items(value: Any) -> Sequence[Any]:
    """Returns what a container contains; a tensor contains nothing."""
    if type(value) is functools.partial:
        return (value.func, *value.args, *value.keywords.values())
    if type(value) is dict:
        return (*value.keys(), *value.values())
    return () if isinstance(value, Tensor) else tuple(value)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_of_torch(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] == "torch"


def _is_of_torch_nn(cls: type) -> bool:
    name = cls.__module__
    return cls is object or (name.startswith("torch.nn.") and not name.startswith("torch.nn.parallel"))


def _is_users(cls: type) -> bool:
    return cls is not object and not _is_of_torch(cls)


def _is_plain_exception(cls: type) -> bool:
    return issubclass(cls, BaseException) and not isinstance(cls.__init__, FunctionType)


def _contents(function: FunctionType) -> dict[str, Any]:
    """Returns the values of a function's outer variables."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: _content(cell) for name, cell in cells}


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _UNKNOWN


def _same_function(function: FunctionType) -> Callable[[], bool]:
    """Returns a check that a function has the same code, defaults and outer variables as now."""
    code, defaults, keyword_defaults = function.__code__, function.__defaults__, function.__kwdefaults__
    cells = [(cell, _content(cell)) for cell in function.__closure__ or ()]

    def check() -> bool:
        return (
            function.__code__ is code
            and function.__defaults__ is defaults
            and function.__kwdefaults__ is keyword_defaults
            and all(_content(cell) is content for cell, content in cells)
        )

    return check


def _same_elements(value: Any) -> Callable[[], bool]:
    """Returns a check that a tensor or container has not been changed in place."""
    if isinstance(value, Tensor):
        version = None if value.is_inference() else value._version
        return lambda: version is None or value._version == version
    items = _items(value)

    def check() -> bool:
        now = _items(value)
        return len(now) == len(items) and all(map(operator.is_, now, items))

    return check
