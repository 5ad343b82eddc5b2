"""What of a module a lowered program depends on, as a value that can be compared and hashed."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Container, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast.layers.skip import Namespace

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    enum.Enum,
    type,
)
_OWN = frozenset({"_parameters", "_buffers", "_modules", "training"})


class _Identity:
    """An object compared by identity; holding it keeps its address from being used again."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class _Walk:
    """One fingerprint in the making; tensors are numbered by first appearance, so that ties show.

    So are namespaces of skip connections: which layers share one is all that counts.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, int] = {}
        self.modules: dict[int, int] = {}
        self.namespaces: dict[Namespace, int] = {}
        self.attributes = True  # whether they count

    def tensor(self, tensor: Tensor | None) -> Hashable:
        if tensor is None:
            return None
        number = self.tensors.setdefault(id(tensor), len(self.tensors))
        if nn.parameter.is_lazy(tensor):
            return (number, type(tensor))
        strides = tensor.stride() if tensor.layout is torch.strided else None
        return (
            number,
            type(tensor),
            tuple(tensor.shape),
            strides,
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
        )

    def attribute(self, value: object) -> Hashable:
        if isinstance(value, _PLAIN):
            # 1, 1.0 and True are equal and trace differently.
            return (type(value), value)
        if isinstance(value, (list, tuple)):
            return (type(value), *map(self.attribute, value))
        if isinstance(value, dict):
            return (dict, *((self.attribute(k), self.attribute(v)) for k, v in value.items()))
        if isinstance(value, (set, frozenset)):
            return (type(value), frozenset(map(self.attribute, value)))
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, Namespace):
            return (Namespace, self.namespaces.setdefault(value, len(self.namespaces)))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
            return (type(value), self.attribute(fields))
        return _Identity(value)

    def module(self, module: nn.Module | None) -> Hashable:
        if module is None:
            return None
        number = self.modules.setdefault(id(module), len(self.modules))
        if number != len(self.modules) - 1:
            return number
        state = vars(module)
        return (
            type(module),
            module.training,
            tuple((k, self.tensor(v)) for k, v in module._parameters.items()),
            tuple((k, self.tensor(v)) for k, v in module._buffers.items()),
            tuple(
                (k, self.attribute(v))
                for k, v in state.items()
                if k not in _OWN
                and not _is_empty(v)
                # Plans have the momentum of deferred batch norms.
                and (self.attributes or k.endswith("_hooks") or k == "momentum")
            ),
            tuple((k, self.module(v)) for k, v in module._modules.items()),
        )


def _is_empty(value: Any) -> bool:
    # The hook tables of a plain module, nearly all of its attributes.
    return isinstance(value, (dict, set)) and not value


def fingerprint(layers: Iterable[nn.Module], in_python: Container[int] = ()) -> Hashable:
    """A value that differs whenever a trace of ``layers`` would.

    It covers classes, train or eval, attributes (plain values, containers and dataclasses by value, all
    else by identity), hooks, and of parameters and buffers shape, strides, dtype, device, whether they
    need gradients and which are tied; not their contents. Equal layers have equal fingerprints.

    Args:
        layers: the layers.
        in_python: which of them are not traced, so that their attributes may change as they run: only
            hooks, of those, count.
    """
    walk = _Walk()
    found: list[Hashable] = []
    for index, layer in enumerate(layers):
        walk.attributes = index not in in_python
        found.append(walk.module(layer))
    return tuple(found)


def snapshot(layers: Iterable[nn.Module]) -> Callable[[], list[str]]:
    """Notes the attributes of all modules; the function returned puts them back and names what changed.

    Parameters and buffers are put back without being named: tracing swaps them, and ties confuse it.
    """
    noted = [
        (name, module, {k: (v, _copies(v, {})) for k, v in vars(module).items()})
        for index, layer in enumerate(layers)
        for name, module in layer.named_modules(prefix=str(index))
    ]

    def restore() -> list[str]:
        changed: list[str] = []
        for name, module, before in noted:
            state = vars(module)
            for key in [k for k in state if k not in before]:
                del state[key]
                changed.append(f"{name}.{key}")
            for key, (value, copies) in before.items():
                mutated = [(c, copied) for c, copied in copies.values() if not _same(c, copied)]
                for container, copied in mutated:
                    _put_back(container, copied)
                if mutated or state.get(key, restore) is not value:
                    state[key] = value
                    if key not in _OWN:
                        changed.append(f"{name}.{key}")
        return changed

    return restore


def _copies(value: Any, found: dict[int, tuple[Any, Any]]) -> dict[int, tuple[Any, Any]]:
    """Every container within ``value``, itself included, beside a copy, by identity."""
    if isinstance(value, (list, dict, set)) and id(value) not in found:
        found[id(value)] = (value, value.copy())
    elif not isinstance(value, tuple):
        return found
    for item in value.values() if isinstance(value, dict) else value:
        _copies(item, found)
    return found


def _same(value: Any, copied: Any) -> bool:
    if isinstance(value, list):
        return len(value) == len(copied) and all(a is b for a, b in zip(value, copied, strict=True))
    if isinstance(value, dict):
        return value.keys() == copied.keys() and all(value[k] is copied[k] for k in value)
    if isinstance(value, set):
        return bool(value == copied)
    return True


def _put_back(value: Any, copied: Any) -> None:
    if isinstance(value, list):
        value[:] = copied
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(copied)
