"""Kernels whose source this process generates."""

from __future__ import annotations

import linecache
import threading
from typing import Any

MODULE = "gpipe_fast.generated"
_SOURCE = "__gpipe_fast_source__"

_lock = threading.Lock()
_kernels: dict[str, Any] = {}


def kernel_of(name: str, text: str) -> Any:
    """Returns the kernel that a source defines; the same object for the same source.

    Args:
        name: the kernel's name in the source.
        text: the source of a module.

    Returns:
        A `triton.jit` function, whose name begins with ``generated.`` in recordings.
    """
    with _lock:
        if text not in _kernels:
            file = f"<gpipe_fast {name}>"
            # Triton reads a kernel's source with `inspect`, which looks here.
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
            namespace: dict[str, Any] = {"__name__": MODULE, _SOURCE: text}
            exec(compile(text, file, "exec"), namespace)
            _kernels[text] = namespace[name]
        return _kernels[text]


def generated_from(function: Any) -> str | None:
    """Returns the source of a generated kernel's Python function; None for another function."""
    found = getattr(function, "__globals__", {}).get(_SOURCE)
    return found if isinstance(found, str) else None
