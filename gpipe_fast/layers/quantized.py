"""Quantized parameters: tensors of other libraries' classes, with the tensors inside that hold their data.

A parameter of bitsandbytes is a tensor of packed numbers, with their scales in an attribute. One of torchao
has no memory of its own: it is a shell around several tensors::

    Params4bit    itself: uint8    .quant_state.absmax, .quant_state.code, .quant_state.state2.absmax, ...
    Int8Tensor                     .qdata: int8, .scale, .zero_point

Stages hold such parameters, and compute with the tensors inside as with buffers. They do not train them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast.layers.sharded import is_gathered, is_sharded, local_tensor, with_local
from gpipe_fast.torch_private.fake_tensors import is_traceable_wrapper_subclass, make_subclass

_PLAIN = (Tensor, nn.Parameter)
# How deep attributes of attributes are looked into: weight.quant_state.state2.absmax.
_DEPTH = 3


def is_quantized(tensor: Tensor) -> bool:
    """Returns whether a tensor has tensors inside."""
    return type(tensor) not in _PLAIN and bool(parts_of(tensor))


def is_wrapper(tensor: Tensor) -> bool:
    """Returns whether a tensor has no memory but that of the tensors inside."""
    is_torchs = type(tensor).__module__.startswith("torch.")  # as a DTensor
    return type(tensor) not in _PLAIN and not is_torchs and is_traceable_wrapper_subclass(tensor)


def parts_of(tensor: Tensor) -> dict[str, Tensor]:
    """Returns the tensors inside a quantized parameter, by the expression that reads them from it."""
    if type(tensor) in _PLAIN or nn.parameter.is_lazy(tensor):
        return {}
    return {path: part for path, _, part in _walk(tensor) if isinstance(part, Tensor)}


def owners_of(tensor: Tensor) -> list[Any]:
    """Returns the objects in a parameter's attributes that hold tensors, such as ``weight.quant_state``."""
    return list({id(owner): owner for _, owner, _ in _walk(tensor) if owner is not tensor}.values())


def stored_tensors(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors in whose memory a parameter or buffer is: itself, with its scales; or its part."""
    if is_sharded(tensor):
        return [local_tensor(tensor.detach())]
    if type(tensor) in _PLAIN or nn.parameter.is_lazy(tensor):
        return [tensor]
    own = [] if is_wrapper(tensor) else [tensor]
    return list({x.untyped_storage()._cdata: x for x in (*own, *parts_of(tensor).values())}.values())


def stored_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a parameter or buffer as it is stored, with its scales."""
    return sum(each.nbytes for each in stored_tensors(tensor))


def stand_in(tensor: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns a tensor for another one, converted with the tensors inside; for a parameter, a parameter."""
    if is_gathered(tensor):
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return nn.Parameter(convert(whole), tensor.requires_grad)
    if is_sharded(tensor):
        return with_local(tensor, convert)
    found = _rewrapped(tensor, convert) if is_wrapper(tensor) else convert(tensor)
    if isinstance(tensor, nn.Parameter):
        # No fake tensor can have the class.
        make = partial(make_subclass, type(tensor)) if type(found) is Tensor else nn.Parameter
        found = make(found, tensor.requires_grad)
    give_parts(found, tensor, convert)
    return found


def give_parts(tensor: Tensor, original: Tensor, convert: Callable[[Tensor], Tensor]) -> None:
    """Gives a tensor the attributes of a quantized one, with converted tensors in them."""
    if type(original) not in _PLAIN and not is_wrapper(original):
        vars(tensor).update(_converted(vars(original), convert, _DEPTH))


def move_parts(module: nn.Module, move: Callable[[Tensor], Tensor]) -> None:
    """Moves the tensors in the attributes of quantized parameters, which ``module._apply`` may leave out.

    So it does those in the attributes of their modules, where bitsandbytes keeps the scales of 8-bit weights.
    """
    for each in module.modules():
        for parameter in each._parameters.values():
            if parameter is None or type(parameter) in _PLAIN or is_wrapper(parameter):
                continue
            for path, owner, tensor in chain(*(_walk_attributes(x, "", _DEPTH) for x in (parameter, each))):
                if owner is not each:
                    vars(owner)[path.rpartition(".")[2]] = move(tensor)


def _rewrapped(tensor: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    names, context = tensor.__tensor_flatten__()
    parts = {name: part for name in names if (part := getattr(tensor, name)) is not None}
    inner = {name: _rewrapped(x, convert) if is_wrapper(x) else convert(x) for name, x in parts.items()}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())


def _converted(attributes: Mapping[str, Any], convert: Callable[[Tensor], Tensor], depth: int) -> Any:
    found = {}
    for name, value in attributes.items():
        if isinstance(value, Tensor):
            value = convert(value)
        elif depth > 1 and _may_hold_tensors(value):
            changed = _converted(vars(value), convert, depth - 1)
            value = copy.copy(value)
            vars(value).update(changed)
        found[name] = value
    return found


def _walk(tensor: Tensor) -> Iterator[tuple[str, Any, Any]]:
    """Yields the expression of each tensor inside a parameter, the object that has it, and the tensor."""
    if not is_wrapper(tensor):
        yield from _walk_attributes(tensor, "", _DEPTH)
        return
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    for name in names:
        part = getattr(tensor, name)
        if part is None:
            continue
        inner = list(_walk(part)) if is_wrapper(part) else [("", tensor, part)]
        for path, owner, value in inner:
            yield f".{name}{path}", owner, value


def _walk_attributes(owner: Any, path: str, depth: int) -> Iterator[tuple[str, Any, Any]]:
    for name, value in vars(owner).items():
        if isinstance(value, Tensor):
            yield f"{path}.{name}", owner, value
        elif depth > 1 and _may_hold_tensors(value):
            yield from _walk_attributes(value, f"{path}.{name}", depth - 1)


def _may_hold_tensors(value: Any) -> bool:
    is_object = hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module))
    return is_object and not callable(value)
