"""Sharded parameters: DTensors, of which each process of a device mesh has a local tensor.

Along the dimension 'tp' of a mesh they are DTensors in the layers' programs, too. Along 'fsdp' they are
gathered once per mini-batch, and programs compute with whole tensors::

    parameter   Shard(0) ── gather_rows ───▶ whole ──▶ forwards and backwards of all micro-batches
    .grad       Shard(0) ◀── sum over processes ────── sum over micro-batches
                         (csrc/pipeline/remote_replicas.cpp)
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The dimension of a mesh over which parameters are divided that are gathered for a mini-batch.
GATHERED_DIM = "fsdp"
_Module = TypeVar("_Module", bound=nn.Module)


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether a tensor is a DTensor."""
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def is_gathered(tensor: Any) -> bool:
    """Returns whether a tensor is a DTensor whose rows are gathered before a run."""
    return is_sharded(tensor) and tensor.device_mesh.mesh_dim_names == (GATHERED_DIM,)


def shard(layers: _Module, mesh: DeviceMesh) -> _Module:
    """Divides the parameters of layers, by rows, over processes that run them for different samples.

    Call it before `GPipe`, in all processes of the mesh alike. `GPipe` gathers the parameters of a stage once
    per mini-batch, and leaves each process its rows of the gradients' sum over all processes. Optimizers,
    clipping and checkpoints see DTensors under the parameters' names::

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
        model = GPipe(shard(layers, mesh["fsdp"]), balance=[4, 4], mesh=mesh)

    Parameters without dimensions or elements, and quantized ones, stay whole in each process. So do buffers.

    Args:
        layers: the layers. In place of their parameters they get DTensors, ``Shard(0)``, with the values of
            the first process of the mesh.
        mesh: the dimension ``'fsdp'`` of a device mesh.

    Returns:
        ``layers``.

    Raises:
        ValueError: the mesh has other dimensions, or a parameter is a DTensor.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    if mesh.mesh_dim_names != (GATHERED_DIM,):
        raise ValueError(f"shard divides over the dimension 'fsdp' alone, got {mesh}; pass mesh['fsdp']")
    found: dict[nn.Parameter, nn.Parameter] = {}
    for title, parameter in layers.named_parameters():
        if is_sharded(parameter):
            raise ValueError(f"the parameter {title!r} is a DTensor already; shard layers without DTensors")
        if type(parameter) is nn.Parameter and parameter.dim() and parameter.numel():
            rows = distribute_tensor(parameter.detach().contiguous(), mesh, [Shard(0)])
            found[parameter] = nn.Parameter(rows, parameter.requires_grad)
    for module in layers.modules():
        own = module._parameters
        own.update((name, found[p]) for name, p in own.items() if p is not None and p in found)
    return layers


def gather_rows(parameters: Sequence[Any], group: Any) -> list[Tensor]:
    """Returns whole tensors for parameters that are divided by rows, by one collective, which sends bytes.

    Args:
        parameters: the parameters, which the processes of the group have in the same order.
        group: the process group; None if this process has all rows.
    """
    found = [parameter.detach().to_local() for parameter in parameters]
    if group is None or not found:
        return found
    rows = [-(-each.shape[0] // group.size()) for each in parameters]
    lengths = [n * each.shape[1:].numel() * each.itemsize for n, each in zip(rows, parameters, strict=True)]
    own = found[0].new_zeros(sum(lengths), dtype=torch.uint8)
    for piece, local in zip(own.split(lengths), found, strict=True):
        piece[: local.nbytes] = local.flatten().view(torch.uint8)
    every = own.new_empty(group.size(), len(own))
    group._allgather_base(every.flatten(), own).wait()
    for number, (piece, each) in enumerate(zip(every.split(lengths, 1), parameters, strict=True)):
        values = piece.clone(memory_format=torch.contiguous_format).view(-1).view(each.dtype)
        found[number] = values[: each.numel()].view(each.shape)
    return found


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


def divided_like(target: Any, tensor: Tensor) -> Tensor:
    """Returns a tensor that all processes have, divided as another one is; if that is whole, the tensor."""
    if not is_sharded(target) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, tensor = target.device_mesh, tensor.to(target.device_mesh.device_type)
    found: Tensor = distribute_tensor(tensor, mesh, target.placements, src_data_rank=None)
    return found


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
