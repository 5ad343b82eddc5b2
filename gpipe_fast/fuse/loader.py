"""Machine code of launches for one device: compiling and loading."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from gpipe_fast._extension import Kernel
from gpipe_fast.fuse.cubins import CompileFailure, Cubin, KernelSource, cubins
from gpipe_fast.lower.launch import KernelLaunch


class KernelLoader:
    """Compiles the kernels of launches, and loads them on a device.

    Attributes:
        device: the device.
        capability: the device's compute capability.
    """

    def __init__(self, device: torch.device) -> None:
        """Makes a loader for a CUDA device."""
        self.device = device
        self.capability = torch.cuda.get_device_capability(device)

    def failures(self, launches: Sequence[KernelLaunch]) -> list[str]:
        """Compiles both forms of each kernel, in parallel, and loads them on the device.

        Returns:
            For each launch why it is impossible, as in "it does not compile .."; "" if it is possible.
        """
        sources = [source for launch in launches for source in sources_of(launch)]
        found = cubins(sources, self.capability)
        pairs = zip(found[::2], found[1::2], strict=True)
        return [self._failure(a) or self._failure(b) for a, b in pairs]

    def _failure(self, form: Cubin | CompileFailure) -> str:
        if isinstance(form, CompileFailure):
            return f"it does not compile for this GPU ({form.reason})"
        try:
            _load(form, self.device)
        except RuntimeError as error:
            reason, _, _ = str(error).partition("\n")
            return f"it does not load on {self.device} ({reason})"
        return ""

    def load(self, launch: KernelLaunch) -> tuple[Kernel, Kernel]:
        """Returns a launch's kernel for aligned pointers and for any pointers, loaded on the device."""
        aligned, unaligned = cubins(sources_of(launch), self.capability)
        assert isinstance(aligned, Cubin)
        assert isinstance(unaligned, Cubin)
        return _load(aligned, self.device), _load(unaligned, self.device)


def sources_of(launch: KernelLaunch) -> tuple[KernelSource, KernelSource]:
    """Returns what is compiled for a launch: forms for pointers that are divisible by 16, and for any."""
    pointers = tuple(launch.signature[i][0] for i in launch.aligned)
    return (
        _source(launch, (*pointers, *launch.divisible)),
        _source(launch, launch.divisible),
    )


def _source(launch: KernelLaunch, divisible: tuple[str, ...]) -> KernelSource:
    return KernelSource(
        launch.kernel,
        launch.signature,
        launch.constants,
        divisible,
        launch.num_warps,
        launch.num_stages,
        launch.contracts,
    )


@functools.lru_cache(maxsize=4096)
def _load(cubin: Cubin, device: torch.device) -> Kernel:
    return Kernel(
        cubin.image,
        cubin.name,
        32 * cubin.num_warps,
        cubin.num_ctas,
        cubin.shared,
        cubin.cooperative,
        cubin.launch_pdl,
        device,
    )
