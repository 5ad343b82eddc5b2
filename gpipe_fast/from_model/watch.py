"""What the code between blocks may read besides tensors: attributes of modules and configurations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_TABLES = frozenset(vars(nn.Module())) - {"training"} | {"_gpipe_fast"}
# How deep objects in attributes of modules are looked into.
_DEPTH = 4


def attributes_of(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """Returns the attributes of modules, as a key: another key means that forward may do something else.

    Plain values are compared by value, containers and objects such as configurations by what they contain,
    and everything else by identity.
    """
    found: list[Any] = []
    seen: set[int] = set()
    for module in modules:
        found += [
            id(module._modules),
            type(module).forward,
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
        ]
        for name, value in vars(module).items():
            if name not in _TABLES:
                found.append(name)
                found.extend(_walk(value, seen, _DEPTH))
        for name, child in module._modules.items():
            found += [name, id(child), child is not None and child.training]
    return tuple(found)


def _walk(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    if isinstance(value, _PLAIN):
        yield type(value)
        yield value
        return
    yield id(value)
    if id(value) in seen or not depth or isinstance(value, (nn.Module, Tensor, type)):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for key, item in value.items():
            yield key if isinstance(key, _PLAIN) else id(key)
            yield from _walk(item, seen, depth - 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield len(value)
        for item in value:
            yield from _walk(item, seen, depth - 1)
    elif not callable(value):
        yield from _walk(getattr(value, "__dict__", None), seen, depth - 1)
