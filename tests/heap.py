"""Memory that the C library has handed out, counted exactly."""

from __future__ import annotations

import ctypes

import pytest

_FIELDS = ["arena", "ordblks", "smblks", "hblks", "hblkhd"]
_FIELDS += ["usmblks", "fsmblks", "uordblks", "fordblks", "keep"]


class _Information(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def _information() -> _Information:
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("needs glibc 2.33")
    library.mallinfo2.restype = _Information
    found: _Information = library.mallinfo2()
    return found


def heap_bytes() -> int:
    """Returns the bytes of all blocks in the heaps of threads, and of those that are mapped by themselves."""
    found = _information()
    return int(found.uordblks + found.hblkhd)
