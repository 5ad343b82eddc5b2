"""Sharded parameters: DTensors, of which each process of a device mesh has a local tensor."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether a tensor is a DTensor."""
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def is_mesh(value: Any) -> bool:
    """Returns whether a value is a device mesh."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", ()))


def are_sharded(layers: Iterable[nn.Module]) -> bool:
    """Returns whether a layer has a sharded parameter."""
    return any(is_sharded(parameter) for layer in layers for parameter in layer.parameters())


class GradientPart(NamedTuple):
    """What a process computes of the gradient of a sharded parameter.

    Attributes:
        placements: how the parts of all processes make the gradient: as those of the parameter, or as terms
            of a sum (``Partial``), as eager autograd leaves them.
        shape: the shape of this process's part.
    """

    placements: tuple[Any, ...]
    shape: tuple[int, ...]


def local_tensor(parameter: Any, gradient: GradientPart | None = None) -> Tensor:
    """Returns the part of a parameter that this process has; of one that is not sharded, the parameter.

    Gradients of the part become gradients of the parameter.

    Args:
        parameter: the parameter.
        gradient: what this process computes of its gradient; None for a part like that of the parameter.
    """
    if not is_sharded(parameter):
        found: Tensor = parameter
    elif gradient is None or gradient.shape == tuple(parameter.to_local().shape):
        found = parameter.to_local(grad_placements=None if gradient is None else gradient.placements)
    else:
        found = _PartOfOtherShape.apply(parameter, gradient)
        # Autograd compares gradients with the shape that the function has returned.
        found.data = parameter.to_local().detach()
    return found


def check_unchanged_in_backward(outputs: Iterable[Tensor], parameters: Iterable[Tensor]) -> None:
    """Lets the backward of outputs raise an error if a sharded parameter is changed in place before it.

    C++ compares the versions of parts only, which do not count changes of the parameter.
    """
    node = next((output.grad_fn for output in outputs if output.grad_fn is not None), None)
    versions = [(parameter, parameter._version) for parameter in parameters if is_sharded(parameter)]
    if node is not None and versions:
        node.register_prehook(functools.partial(_check_versions, versions))


def _check_versions(versions: Sequence[tuple[Tensor, int]], gradients: object) -> None:
    for parameter, version in versions:
        if parameter._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a sharded parameter of shape {list(parameter.shape)} is at version "
                f"{parameter._version}; expected version {version} instead"
            )


def whole_tensor(tensor: Any) -> Tensor:
    """Returns a tensor, gathered from all processes of its mesh if it is sharded; all of them call this."""
    found: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return found


def with_local(tensor: Any, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns a sharded tensor with a converted local one; for a parameter, a parameter."""
    found = _placed(tensor, convert(tensor.detach().to_local()), tensor.placements)
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def _placed(like: Any, local: Tensor, placements: Sequence[Any]) -> Tensor:
    """Returns a sharded tensor with the sizes and mesh of another one."""
    kwargs = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    found: Tensor = type(like).from_local(local, like.device_mesh, placements, **kwargs)
    return found


class _PartOfOtherShape(torch.autograd.Function):
    """As ``to_local``, where the part of the gradient has another shape: it is a term of all of it."""

    @staticmethod
    def forward(ctx: Any, parameter: Any, gradient: GradientPart) -> Tensor:
        ctx.parameter, ctx.placements = parameter.detach(), gradient.placements
        found: Tensor = parameter.to_local().new_empty(()).expand(gradient.shape)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, None]:
        return _placed(ctx.parameter, gradient, ctx.placements), None
