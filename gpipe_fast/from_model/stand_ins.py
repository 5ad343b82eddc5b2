"""Fake tensors in the place of those that a model has, and its attributes, while a call of it is captured."""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from gpipe_fast.from_model.dataflow import CannotCut, Owned
from gpipe_fast.layers.quantized import stand_in
from gpipe_fast.layers.sharded import is_sharded
from gpipe_fast.strides import empty_like
from gpipe_fast.torch_private.fake_tensors import FakeTensorMode

# The modules of a model, with their names.
Names = Mapping[nn.Module, str]
# Returns the real tensor that a module has.
ReadOwned = Callable[[Owned], Tensor]


def _tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, vars(module)


def _tensors(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, dict[str, Any], str, Tensor]]:
    """Yields the tensors of modules: the module, its table, the name in it, and the tensor."""
    for module in modules:
        for table in _tables(module):
            yield from ((module, table, name, x) for name, x in table.items() if isinstance(x, Tensor))


def owners(names: Names) -> dict[int, tuple[Tensor, Owned]]:
    """Returns the tensors of modules and where they are, by identity; the outermost owner counts."""
    found = _tensors(reversed(list(names)))
    return {id(tensor): (tensor, Owned(module, name)) for module, _, name, tensor in found}


def has_own_class(tensor: Tensor) -> bool:
    """Returns whether a tensor has a class that its fake tensor lacks."""
    return type(tensor) not in (Tensor, nn.Parameter)


def with_own_classes(names: Names) -> set[nn.Module]:
    """Returns the modules that have a tensor of a class that its fake tensor lacks; not for a DTensor."""
    return {module for module, _, _, x in _tensors(names) if has_own_class(x) and not is_sharded(x)}


@contextlib.contextmanager
def fake_parameters(names: Names, mode: FakeTensorMode, device: torch.device) -> Iterator[ReadOwned]:
    """Replaces the parameters and buffers of modules, and other tensors that they have, in a block.

    Yields a function that returns the real tensor.

    Args:
        names: the modules.
        mode: the fake mode.
        device: the device of all fake tensors.
    """
    fakes: dict[int, Tensor] = {}
    before = [(table, name, tensor) for _, table, name, tensor in _tensors(names)]
    try:
        for table, name, tensor in before:
            if id(tensor) not in fakes:
                fakes[id(tensor)] = _fake(tensor, mode, device)
            table[name] = fakes[id(tensor)]
        real = {(id(table), name): tensor for table, name, tensor in before}

        def read(owned: Owned) -> Tensor:
            own = _tables(owned.owner)
            return next(real[id(t), owned.name] for t in own if (id(t), owned.name) in real)

        yield read
    finally:
        for table, name, tensor in before:
            table[name] = tensor


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    with mode:
        make = functools.partial(empty_like, device=device)
        fake = stand_in(tensor, make) if is_sharded(tensor) else make(tensor)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, tensor.requires_grad)
        else:
            fake.requires_grad_(tensor.requires_grad)
    vars(fake).update({k: v for k, v in vars(tensor).items() if k not in vars(fake)})  # a user's attributes
    return fake


@contextlib.contextmanager
def real_tensors(module: nn.Module, read: ReadOwned) -> Iterator[None]:
    """Puts the real tensors of a module back for a block, with copies of its buffers.

    Zeros on the CPU stand for those on GPUs, and on the meta device, as of stages in other processes.
    """
    tables: list[tuple[nn.Module, dict[str, Any]]] = [
        (inner, table) for inner in module.modules() for table in (inner._parameters, inner._buffers)
    ]
    before = [(*each, *item) for each in tables for item in each[1].items() if item[1] is not None]
    try:
        for inner, table, name, _ in before:
            real = read(Owned(inner, name))
            if real.device.type != "cpu":
                real = stand_in(real, lambda each: empty_like(each, "cpu").zero_())
            table[name] = real.clone() if table is inner._buffers else real
        yield
    finally:
        for _, table, name, fake in before:
            table[name] = fake


_TABLES = frozenset(vars(nn.Module()))
# Attributes that are compared by value.
PLAIN = (type(None), bool, int, float, complex, str, bytes)
_NOT_CONFIGURATIONS = (nn.Module, Tensor, type, types.FunctionType, types.MethodType, types.ModuleType)


def configurations(names: Names) -> list[Any]:
    """Returns the plain attributes of the objects that modules have, such as of a configuration."""
    objects = {id(x): x for m in names for x in vars(m).values() if hasattr(x, "__dict__")}
    return [
        (key, value)
        for each in objects.values()
        if not isinstance(each, _NOT_CONFIGURATIONS)
        for key, value in vars(each).items()
        if isinstance(value, PLAIN)
    ]


@contextlib.contextmanager
def restored_attributes(names: Names) -> Iterator[Callable[[Set[nn.Module]], None]]:
    """Restores the attributes of modules after a block.

    Yields a check that nothing was written to attributes of some modules, nor to the containers of any, which
    raises `CannotCut`. Other modules may have attributes of their own, such as a state.
    """
    before = {module: dict(vars(module)) for module in names}
    # The newest transformers adds hooks when it is first asked for hidden states.
    hooks = [(each, dict(each)) for m in names for each in (m._forward_hooks, m._forward_pre_hooks)]
    contents = [
        (f"{name}.{key}".lstrip("."), value, _contents(value))
        for module, name in names.items()
        for key, value in vars(module).items()
        if key not in _TABLES and isinstance(value, (dict, list, builtins.set))
    ]

    def check(opened: Set[nn.Module]) -> None:
        for name, value, known in contents:
            if not _are_same(_contents(value), known):
                raise CannotCut(
                    f"forward writes to {name}, a side channel between blocks, which may run at the same time"
                )
        for module, name in names.items():
            for key, value in vars(module).items() if module in opened else ():
                if value is not before[module].get(key) and key not in _TABLES:
                    raise CannotCut(f"forward sets {f'{name}.{key}'.lstrip('.')}, a side effect")

    try:
        yield check
    finally:
        for module, attributes in before.items():
            state = vars(module)
            for key in state.keys() - attributes.keys():
                del state[key]
            state.update(attributes)
        for _, value, known in contents:
            if not _are_same(_contents(value), known):
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(known)
        for table, entries in hooks:
            if table.keys() != entries.keys():
                table.clear()
                table.update(entries)


def _contents(container: Any) -> list[Any]:
    return list(container.items() if isinstance(container, dict) else container)


def _are_same(contents: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(contents) == len(others) and all(map(_is_same, contents, others))


def _is_same(x: Any, y: Any) -> bool:
    if type(x) is tuple and type(y) is tuple:
        return _are_same(x, y)
    return x is y or (isinstance(x, PLAIN) and x == y)


@contextlib.contextmanager
def caches_restored(names: Names) -> Iterator[None]:
    """Clears caches of functions that would keep fake tensors, of those that the classes' modules have."""
    scopes = {id(scope): scope for m in names for scope in _scopes_of(type(m))}
    values = [value for scope in scopes.values() for value in list(vars(scope).values())]
    values += [value for each in values if isinstance(each, types.FunctionType) for value in _outer(each)]
    caches = [value for value in values if isinstance(value, functools._lru_cache_wrapper)]
    before = [cache.cache_info().misses for cache in caches]
    try:
        yield
    finally:
        for cache, misses in zip(caches, before, strict=True):
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def _outer(function: types.FunctionType) -> Iterator[Any]:
    """Returns the outer variables of a function, as of a decorated one."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty one
            yield cell.cell_contents


def _scopes_of(cls: type) -> Iterator[Any]:
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        yield base
        if base.__module__ in sys.modules:
            yield sys.modules[base.__module__]


COLLECTED = "would be collected inside of blocks"


@contextlib.contextmanager
def collectors_refused() -> Iterator[Callable[[], contextlib.AbstractContextManager[Any]]]:
    """Refuses outputs that transformers collects inside of blocks, in a block.

    Yields a function that allows them in a block again, for those of a module that runs as a whole.
    """
    module: Any = sys.modules.get("transformers.utils.output_capturing")
    variable = getattr(module, "CompileableContextVar", None)
    if variable is None:
        yield contextlib.nullcontext
        return
    own = {name: getattr(variable, name) for name in ("set", "reset", "get")}
    install = getattr(module, "maybe_install_capturing_hooks", None)

    def set_outputs(self: Any, outputs: Any) -> None:
        names = [key for key in outputs if not key.startswith("_")]
        if names:
            raise CannotCut(
                f"{' and '.join(names)} {COLLECTED}; leave output_{names[0]} off, or "
                "call model.plain() for such an output"
            )

    def do_nothing(*_: Any) -> None: ...

    @contextlib.contextmanager
    def allowed() -> Iterator[None]:
        with (
            mock.patch.multiple(variable, **own),
            mock.patch.object(module, "maybe_install_capturing_hooks", install, create=True),
        ):
            yield

    with (
        mock.patch.multiple(variable, set=set_outputs, reset=do_nothing, get=do_nothing),
        mock.patch.object(module, "maybe_install_capturing_hooks", do_nothing, create=True),
    ):
        yield allowed
