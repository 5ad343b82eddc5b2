"""Which devices can launch kernels, and which use fused kernels.

Triton is imported only for such devices, because CPU builds of PyTorch lack it.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

import torch

from gpipe_fast import switches
from gpipe_fast._extension import build_info
from gpipe_fast.trace.joint_graph import JointGraph
from gpipe_fast.trace.symbolic import Instance
from gpipe_fast.trace.traceability import Untraceable
from gpipe_fast.trace.triton_calls import is_triton_call

if TYPE_CHECKING:
    from gpipe_fast.fuse.cubins import KernelLoader
    from gpipe_fast.fuse.fuse import Fusion

# The oldest GPUs that fused kernels are compiled for.
MIN_CAPABILITY = (8, 0)
# The oldest CUDA runtime that loads kernels from their images (csrc/cuda/kernel.cpp).
_MIN_CUDA = (12, 8)


def has_triton() -> bool:
    """Returns whether the package ``triton`` is installed."""
    return importlib.util.find_spec("triton") is not None


def loader_of(device: torch.device) -> KernelLoader | None:
    """Returns the loader for a device, or None for a device on which programs cannot launch kernels."""
    if device.type != "cuda" or not has_triton() or not _loads_kernels():
        return None
    return _loader(device)


def why_unfused(device: torch.device, enabled: bool = True, is_absent: bool = False) -> str | None:
    """Returns why stages on a device use no fused kernels, as the end of "because ..."; None if they do.

    Args:
        device: the device.
        enabled: whether the model has ``fuse``.
        is_absent: whether the machine need not have the device; kernels are then not compiled.
    """
    if device.type != "cuda":
        return "the stage is on the CPU, where PyTorch's operators run"
    if not enabled:
        return "the model has fuse=False"
    if switches.is_disabled("fuse"):
        return f"{switches.VARIABLE} contains 'fuse'"
    if torch.are_deterministic_algorithms_enabled():
        return "only deterministic algorithms are allowed"
    if not has_triton():
        return "the package triton is not installed"
    loader = None if is_absent else loader_of(device)
    if not is_absent and (loader is None or loader.capability < MIN_CAPABILITY):
        return "kernels need CUDA 12.8, and a GPU of compute capability 8.0 or higher"
    return None


def fusion_of(device: torch.device, enabled: bool = True, is_absent: bool = False) -> Fusion | None:
    """Returns the fusion for a device, by the arguments of `why_unfused`; None if that has a reason."""
    if why_unfused(device, enabled, is_absent) is not None:
        return None
    return _fusion(None if is_absent else loader_of(device))


def with_user_launches(
    graph: JointGraph | Instance, device: torch.device, is_absent: bool = False
) -> JointGraph | Instance:
    """Returns a joint graph that launches users' own Triton kernels (fuse/user_kernels.py).

    Raises:
        Untraceable: they cannot be launched.
    """
    if isinstance(graph, Instance):
        if not graph.template.calls_triton:
            return graph
        joint = graph.joint
    else:
        joint = graph
    if not any(map(is_triton_call, joint.module.graph.nodes)):
        return joint
    if is_absent:
        raise Untraceable(None, "its own Triton kernels are compiled only for a GPU that is present")
    from gpipe_fast.fuse.user_kernels import with_launches

    return with_launches(joint, loader_of(device))


@functools.cache
def _loads_kernels() -> bool:
    cuda = build_info()["cuda"]
    return cuda != "none" and tuple(int(n) for n in cuda.split(".")[:2]) >= _MIN_CUDA


@functools.cache
def _loader(device: torch.device) -> KernelLoader:
    from gpipe_fast.fuse.cubins import KernelLoader

    return KernelLoader(device)


@functools.cache
def _fusion(loader: KernelLoader | None) -> Fusion:
    from gpipe_fast.fuse.fuse import Fusion

    return Fusion(loader)
