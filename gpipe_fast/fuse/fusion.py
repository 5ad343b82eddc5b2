"""Fusion of the stages of one device: the pass, with kernels that compile."""

from __future__ import annotations

from gpipe_fast.fuse.check import has_passed
from gpipe_fast.fuse.cubins import CompileFailure, Cubin
from gpipe_fast.fuse.fuse import Fused, fuse, fuse_alike
from gpipe_fast.fuse.left_out import is_left_out, leave_out
from gpipe_fast.fuse.loader import KernelLoader
from gpipe_fast.lower.launch import KernelLaunch
from gpipe_fast.lower.split import StageGraph


class Fusion:
    """Fuses graphs for one device."""

    def __init__(self, loader: KernelLoader) -> None:
        """Makes a fusion for the loader's device."""
        self._loader = loader

    def fuse(self, forward: StageGraph, backward: StageGraph | None) -> list[Fused]:
        """Fuses the graphs of a stage, and compiles their kernels.

        Kernels that do not compile are left out, after a warning: PyTorch's operators compute their nodes.
        """
        while True:
            found = self._fuse(forward, backward)
            launches = {launch.specialization: launch for each in found for launch in each.launches()}
            compiled = self._loader.compile(list(launches.values()))
            if all([*map(_compiles, launches.values(), compiled)]):
                return found

    def _fuse(self, forward: StageGraph, backward: StageGraph | None) -> list[Fused]:
        if backward is None:
            return [fuse(forward, self._is_usable, self._is_unchecked)]
        return list(fuse_alike(forward, backward, self._is_usable, self._is_unchecked))

    def _is_usable(self, launch: KernelLaunch) -> bool:
        return not is_left_out(launch)

    def _is_unchecked(self, launch: KernelLaunch) -> bool:
        return not has_passed(launch, self._loader.device)


def _compiles(launch: KernelLaunch, found: Cubin | CompileFailure) -> bool:
    if isinstance(found, CompileFailure):
        leave_out(launch, f"it does not compile for this GPU ({found.reason})")
        return False
    return True
