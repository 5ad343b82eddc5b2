"""Fusion of the stages of one device: the pass, with kernels that compile and load."""

from __future__ import annotations

from gpipe_fast.fuse.check import has_passed
from gpipe_fast.fuse.fuse import Fused, fuse, fuse_alike
from gpipe_fast.fuse.left_out import leave_out, reason_of
from gpipe_fast.fuse.loader import KernelLoader
from gpipe_fast.lower.launch import KernelLaunch
from gpipe_fast.lower.split import StageGraph


class Fusion:
    """Fuses graphs for one device."""

    def __init__(self, loader: KernelLoader | None) -> None:
        """Makes a fusion for the loader's device; None for a device that the machine need not have."""
        self._loader = loader

    def fuse(self, forward: StageGraph, backward: StageGraph | None, explain: bool = False) -> list[Fused]:
        """Fuses the graphs of a stage, and compiles and loads their kernels.

        Kernels for which that fails are left out, after a warning: PyTorch's operators compute their nodes.

        Args:
            forward: the forward.
            backward: the backward; None if there is none.
            explain: whether to find out why nodes are left.
        """
        while True:
            found = self._fuse(forward, backward, explain)
            if self._loader is None:
                return found
            launches = {launch.specialization: launch for each in found for launch in each.launches()}
            failures = self._loader.failures(list(launches.values()))
            for launch, reason in zip(launches.values(), failures, strict=True):
                if reason:
                    leave_out(launch, reason)
            if not any(failures):
                return found

    def _fuse(self, forward: StageGraph, backward: StageGraph | None, explain: bool) -> list[Fused]:
        if backward is None:
            return [fuse(forward, reason_of, self._is_unchecked, explain=explain)]
        return list(fuse_alike(forward, backward, reason_of, self._is_unchecked, explain))

    def _is_unchecked(self, launch: KernelLaunch) -> bool:
        return self._loader is not None and not has_passed(launch, self._loader.device)
