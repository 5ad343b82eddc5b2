"""Checks of the arguments of `GPipe` that concern other processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpipe_fast import _extension
from gpipe_fast.devices import Device, checked_devices, parse_device, parse_devices
from gpipe_fast.layers.sharded import GATHERED_DIM, is_gathered, is_sharded
from gpipe_fast.layers.structure import layer_title
from gpipe_fast.runtime.settings import Settings
from gpipe_fast.runtime.stage import Tie
from gpipe_fast.torch_private.modules import IGNORED_BY_DDP
from gpipe_fast.trace.joint_graph import parameters_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Mesh = DeviceMesh | dist.ProcessGroup

# The dimensions of a mesh along which stages, their replicas and the parts of their parameters lie, as in
# torchtitan.
PIPELINE_DIM, REPLICA_DIM, SHARD_DIM = "pp", "dp_replicate", "tp"


def grid_of(mesh: Mesh) -> list[list[int]]:
    """Returns the rank of each process in torch.distributed, by replica and shard, and by stage.

    Raises:
        TypeError: ``mesh`` is neither a device mesh nor a process group.
        ValueError: the mesh has no dimension for stages or shards, or others.
        RuntimeError: there is no torch.distributed, or no gloo.
    """
    if _extension.make_channels is None or not dist.is_available() or not dist.is_gloo_available():
        raise RuntimeError(
            "mesh needs torch.distributed with gloo, which this build of PyTorch lacks; pass mesh=None to "
            "keep all stages in one process"
        )
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(mesh, dist.ProcessGroup):
        return [dist.get_process_group_ranks(mesh)]
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a DeviceMesh or a ProcessGroup of torch.distributed, got {type(mesh).__name__}; "
            "pass init_device_mesh('cpu', (num_stages,), mesh_dim_names=('pp',))"
        )
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1 and (not names or tuple(mesh.shape) == (1,)):
        return [mesh.mesh.tolist()]
    sizes = dict(zip(names, mesh.shape, strict=False))
    if sizes.keys().isdisjoint((PIPELINE_DIM, SHARD_DIM, GATHERED_DIM)):
        raise ValueError(
            f"mesh has the dimensions {names} of sizes {tuple(mesh.shape)}, and none is called 'pp', along "
            "which the stages lie, 'tp' or 'fsdp'; pass mesh_dim_names=(..., 'pp') to init_device_mesh"
        )
    known = (PIPELINE_DIM, REPLICA_DIM, SHARD_DIM, GATHERED_DIM)
    larger = {n: size for n, size in sizes.items() if n not in known and size > 1}
    if larger:
        raise ValueError(
            f"mesh has the dimensions {larger}, but GPipe uses only 'pp', for stages, 'tp', for tensor "
            "parallelism inside of stages, and for replicas 'dp_replicate', or 'fsdp', over which "
            "gpipe_fast.shard divides their parameters: make a mesh of these"
        )
    if min(sizes.get(REPLICA_DIM, 1), sizes.get(GATHERED_DIM, 1)) > 1:
        raise ValueError(
            f"mesh has the dimensions {names} of sizes {tuple(mesh.shape)}, and parameters are either whole "
            "in each replica or divided over all; pass one of 'dp_replicate' and 'fsdp'"
        )
    # The reshape drops the other dimensions, which have size 1.
    order = sorted(range(mesh.ndim), key=lambda dim: (names[dim] == PIPELINE_DIM, names[dim] == SHARD_DIM))
    grid: list[list[int]] = mesh.mesh.permute(order).reshape(-1, sizes.get(PIPELINE_DIM, 1)).tolist()
    return grid


def num_shards_of(mesh: Mesh) -> int:
    """Returns the number of processes along the dimension for tensor parallelism."""
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return mesh.shape[names.index(SHARD_DIM)] if SHARD_DIM in names else 1  # type: ignore[union-attr]


def checked_timeout(timeout: float) -> float:
    """Returns the maximum time, in seconds, to wait for another process.

    Raises:
        ValueError: it is not positive.
    """
    if not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    return float(timeout)


def check_balance(balance: Sequence[int], num_ranks: int) -> None:
    """Checks that all processes have equally many stages.

    Raises:
        ValueError: they do not.
    """
    if not balance or len(balance) % num_ranks:
        raise ValueError(
            f"balance has {len(balance)} stages, but mesh has {num_ranks} processes: {list(balance)}; "
            "pass one stage for each process, or equally many"
        )


def own_device(
    devices: Iterable[Device] | Device | None, kind: str, rank: int, num_ranks: int
) -> torch.device:
    """Returns the device of this process's stage.

    Args:
        devices: that device, or one for each process; by default the CPU or the current GPU.
        kind: the type of the default device.
        rank: the number of this process.
        num_ranks: the number of processes.

    Raises:
        TypeError: an element of ``devices`` is not a device.
        ValueError: there are not as many devices as processes, or this process has no such device.
    """
    if devices is None:
        device = torch.device(kind)
    elif isinstance(devices, (str, int, torch.device)):
        device = parse_device(devices, "devices")
    else:
        each = parse_devices(devices)
        if len(each) != num_ranks:
            raise ValueError(
                f"devices has {len(each)} devices, but mesh has {num_ranks} processes: "
                f"{list(map(str, each))}; pass the device of this process's stage, such as devices='cuda', "
                "or one for each process"
            )
        device = each[rank]
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return checked_devices([device], 1)[0]


def check_replicas(num_replicas: int, device: torch.device, by_nccl: bool) -> None:
    """Checks that replicas can sum gradients where they are.

    Raises:
        ValueError: they cannot.
    """
    if num_replicas > 1 and device.type != "cpu" and not by_nccl:
        raise ValueError(
            f"replicas along 'dp_replicate' or 'fsdp' sum gradients on GPUs by NCCL alone, got "
            f"{num_replicas} on {device} and a mesh without it; call init_process_group('nccl') before "
            "init_device_mesh"
        )


def check_shards(
    layers: Iterable[nn.Module],
    ranks: Sequence[int],
    replicas: Sequence[int],
    device: torch.device,
    by_nccl: bool = False,
) -> None:
    """Checks that parameters of layers are sharded over processes that run the same stages.

    Args:
        layers: the layers.
        ranks: the numbers in torch.distributed of the processes that run the same stages on the same samples.
        replicas: those of the processes that run them on other samples, and of this one.
        device: the device of the stages.
        by_nccl: whether processes exchange tensors on GPUs by NCCL.

    Raises:
        ValueError: a parameter is sharded over other processes, in an unsupported way, or on another device;
            it is on a GPU, without NCCL;
            a buffer is sharded; or no parameter is, though there are several processes.
    """
    layers, found = list(layers), False
    for number, layer in enumerate(layers):
        for name, buffer in layer.named_buffers():
            if is_sharded(buffer):
                raise ValueError(
                    f"{layer_title(number, layer)} has the buffer {name!r}, which is a DTensor; stages have "
                    f"buffers whole: register {name}.full_tensor() in its place"
                )
        for name, parameter in layer.named_parameters():
            if not is_sharded(parameter):
                continue
            title = f"{layer_title(number, layer)} has the DTensor {name!r}"
            if is_gathered(parameter):
                _check_gathered(title, parameter, replicas)
            found |= not is_gathered(parameter)
            _check_shard(title, parameter, replicas if is_gathered(parameter) else ranks, device)
            if device.type != "cpu" and not by_nccl:
                raise ValueError(
                    f"{title} on {device}, and processes exchange such tensors on GPUs by NCCL alone, "
                    "which mesh lacks; call init_process_group('nccl') before init_device_mesh"
                )
    if len(ranks) > 1 and not found:
        raise ValueError(
            f"mesh has {len(ranks)} processes along 'tp', and no parameter of the layers is a DTensor, so "
            "all would compute the same; first call parallelize_module(layer, mesh['tp'], plan) for layers"
        )


def _check_gathered(title: str, parameter: Any, replicas: Sequence[int]) -> None:
    over = parameter.device_mesh.mesh.tolist()
    if over != list(replicas) or not parameter.placements[0].is_shard(0):
        raise ValueError(
            f"{title} of placements {parameter.placements} over the ranks {over}, and stages gather rows "
            f"along 'fsdp', over the ranks {list(replicas)} here; pass GPipe the mesh of which "
            "gpipe_fast.shard got mesh['fsdp']"
        )


def _check_shard(title: str, parameter: Any, ranks: Sequence[int], device: torch.device) -> None:
    over = parameter.device_mesh.mesh.flatten().tolist()
    if not set(over) <= set(ranks):
        raise ValueError(
            f"{title} over the ranks {over}, which do not all run the same stages as this process: ranks "
            f"{list(ranks)} do; pass GPipe mesh=..., a mesh with the dimension 'tp', of which "
            "parallelize_module gets mesh['tp']"
        )
    if any(each.is_partial() for each in parameter.placements):
        raise ValueError(
            f"{title} of placements {parameter.placements}, of which each process has a term of a sum; "
            "redistribute it to Replicate() or Shard(...)"
        )
    if not parameter.is_meta and parameter.device != device:
        raise ValueError(
            f"{title} on {parameter.device} for a stage on {device}; make the mesh with "
            f"init_device_mesh({device.type!r}, ...), of which the DTensor and GPipe get their dimensions, "
            "and call torch.cuda.set_device before"
        )


def refuse_ddp(model: nn.Module) -> None:
    """Makes DistributedDataParallel refuse a model whose stages are in several processes."""
    vars(model)[IGNORED_BY_DDP] = _NotForDDP()


class _NotForDDP:
    """Stands for the names of the tensors that DistributedDataParallel would ignore; it raises ValueError."""

    def __iter__(self) -> Iterator[str]:
        raise ValueError(
            "DistributedDataParallel expects the same parameters in all processes, got a model with a mesh, "
            "whose processes have different layers; instead, pass a mesh with a dimension 'dp_replicate', "
            "for replicas of all stages"
        )


def default_kind(mesh: Mesh) -> str:
    """Returns the type of a process's device if the user names none.

    A device mesh has devices of a type; a process group uses GPUs if it transfers their memory.
    """
    if isinstance(mesh, dist.ProcessGroup):
        return "cuda" if uses_nccl(mesh) else "cpu"
    return mesh.device_type


def uses_nccl(mesh: Mesh) -> bool:
    """Returns whether its processes transfer tensors on GPUs by NCCL."""
    group = mesh if isinstance(mesh, dist.ProcessGroup) else mesh.get_group(mesh.ndim - 1)
    return "nccl" in {group._get_backend(d).name() for d in group._device_types if d.type == "cuda"}


def check_settings(settings: Settings) -> None:
    """Checks that stages in several processes can have these settings.

    Raises:
        ValueError: all layers are to run in Python, though the shapes that other processes send are known
            from traces; or there is a memory limit.
    """
    if settings.backend == "eager":
        raise ValueError(
            "backend='eager' with a mesh is not possible: each process gets the shapes that others send from "
            "traces of all layers; pass backend='auto'"
        )
    if settings.memory_limit is not None:
        raise ValueError(
            f"memory={settings.memory_limit!r} with a mesh is not possible yet, because each process would "
            "measure other times, and choose something else; pass checkpoint, a number for each stage"
        )


def ties_of(partitions: Sequence[nn.Module]) -> list[Tie]:
    """Returns the parameters that several stages share, each of which has a copy of its own.

    Raises:
        ValueError: one of them is sharded; the parts of its gradients may differ in shape.
    """
    found: dict[Tensor, list[tuple[int, int]]] = {}
    for stage, partition in enumerate(partitions):
        for index, parameter in enumerate(parameters_of(list(partition.children()))):
            found.setdefault(parameter, []).append((stage, index))
    ties = {tensor: uses for tensor, uses in found.items() if len(uses) > 1}
    for tensor, uses in ties.items():
        if is_sharded(tensor):
            raise ValueError(
                f"stages {[stage for stage, _ in uses]} share a DTensor of shape {list(tensor.shape)}; "
                "choose a balance that keeps its layers in one stage, or give each layer its own parameter"
            )
    return [tuple(uses) for uses in ties.values()]


def check_not_shared(partitions: Sequence[nn.Module], num_ranks: int) -> None:
    """Checks that no stages of two processes share a buffer, because they have no memory in common.

    Raises:
        ValueError: two stages do; the message names the tensor and the stages.
    """
    owners: dict[Tensor, tuple[int, str]] = {}
    for stage, partition in enumerate(partitions):
        for name, tensor in partition.named_buffers():
            owner, first_name = owners.setdefault(tensor, (stage, name))
            if (owner - stage) % num_ranks:
                raise ValueError(
                    f"stages {owner} and {stage} share the buffer {first_name!r}, which is also {name!r}; "
                    "with a mesh they are in different processes, and each would write its own: choose a "
                    "balance that keeps both layers in one process, or give each its own buffer"
                )
