"""The resident memory of this process, in MiB. Systems without /proc do not report it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path


def release() -> None:
    """Returns memory that nothing uses to the system, as far as the C library can."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> bool:
    """Sets the kernel's peak to the present resident memory; returns whether it does."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def present() -> float:
    """Returns the present resident memory."""
    return _status("VmRSS")


def peak() -> float:
    """Returns the peak since the latest reset."""
    return _status("VmHWM")


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))
