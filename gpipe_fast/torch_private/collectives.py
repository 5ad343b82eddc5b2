"""Functional collectives: their operators, and the groups that they name.

Read in PyTorch 2.11.0 and 2.14.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import (
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)

# The namespace of the operators, which start a collective, and of `wait_tensor`, which waits for its result.
NAMESPACE = "_c10d_functional"
# The name of their argument that names a group.
GROUP = "group_name"


def _named(name: str) -> Any:
    """Returns a name in PyTorch's own type of strings."""
    return name


def group_of(name: str) -> Any:
    """Returns the process group of a name."""
    return _resolve_process_group(_named(name))


def register_group(name: str, store: Any, backend: Any, device: torch.device) -> Any:
    """Makes a group of a backend, for tensors on devices of a type, and registers it under a name of its own.

    Unlike ``new_group``, this leaves the number of groups that PyTorch has made, which all processes must
    have in common, as it is.
    """
    group = dist.ProcessGroup(store, backend.rank(), backend.size())
    kind = getattr(dist.ProcessGroup.BackendType, "GLOO" if device.type == "cpu" else "NCCL")
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, backend)
    group._set_group_name(_named(name))
    _register_process_group(_named(name), group)
    return group


def unregister_group(name: str) -> None:
    """Forgets a group, if PyTorch has not done so."""
    with contextlib.suppress(RuntimeError):
        _unregister_process_group(_named(name))


@contextlib.contextmanager
def one_of_many(size: int) -> Iterator[None]:
    """Makes this process one of a group in a block, whose other processes do not exist.

    Collectives of the group do nothing. There may be no group of torch.distributed before.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
