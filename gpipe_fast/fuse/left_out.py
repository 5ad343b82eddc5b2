"""The kernels that this process leaves out, because they do not compile or load, or gave wrong results."""

from __future__ import annotations

import threading
from collections.abc import Hashable

from gpipe_fast.lower.launch import KernelLaunch

_lock = threading.Lock()
_reasons: dict[Hashable, str] = {}
_names: set[str] = set()
# Warnings to issue, one per kernel; whoever issues them removes them.
pending: list[str] = []


def leave_out(launch: KernelLaunch, reason: str) -> None:
    """Leaves a kernel out from now on. The first time for a kernel of this name, a warning becomes pending.

    Args:
        launch: a launch of the kernel. Other specializations of the kernel are not left out.
        reason: what is wrong, as the end of the sentence "the fused kernel NAME is left out: ".
    """
    with _lock:
        _reasons.setdefault(launch.specialization, reason)
        if launch.name in _names:
            return
        _names.add(launch.name)
        pending.append(
            f"the fused kernel {launch.name} is left out, and PyTorch's operators compute instead: {reason}; "
            "please report this with the output of `python -m gpipe_fast.doctor`"
        )


def reason_of(launch: KernelLaunch) -> str | None:
    """Returns why a kernel is left out; None for a kernel that is used."""
    return _reasons.get(launch.specialization)


def number_left_out() -> int:
    """Returns how many kernels are left out. A plan that was made with fewer may launch one of them."""
    return len(_reasons)


def names() -> list[str]:
    """Returns the names of the kernels that are left out."""
    return sorted(_names)
