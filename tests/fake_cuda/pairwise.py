"""Sums in Triton's interpreter, added in pairs as on a GPU: the error grows with log2(n), not with n.

NumPy adds the rows of a block one after another. A program on a GPU adds the few elements that each thread
has, and then exchanges the sums of threads and of warps, which halves their number each time. `correct`
replaces the interpreter's sum, so that a test of a kernel's error does not measure NumPy's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def sum_in_pairs(values: Array, axis: int) -> Array:
    """Returns the sums along an axis, in the dtype of the values."""
    rest = np.moveaxis(values, axis, 0)
    while len(rest) > 1:
        half = len(rest) // 2
        odd = rest[2 * half :]
        rest = np.concatenate((rest[:half] + rest[half : 2 * half], odd))
    return rest[0]


def correct(interpreter: Any) -> None:
    """Corrects the sums of Triton's interpreter, for the rest of the process.

    Args:
        interpreter: The module `triton.runtime.interpreter`.
    """
    add = interpreter.ReduceOps.sum

    def sum_floats_in_pairs(own: Any, block: Any) -> Any:
        values = block.handle.data
        if own.axis is None or values.dtype.kind != "f":
            return add(own, block)
        found = sum_in_pairs(values, own.axis)
        return own.to_tensor(np.expand_dims(found, own.axis) if own.keep_dims else found, block.dtype)

    interpreter.ReduceOps.sum = sum_floats_in_pairs
