"""The operator by which a trace holds the launch of a user's Triton kernel.

Its nodes refer to side tables of kernels and constants. Read in PyTorch 2.11.0 and 2.14.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

from torch._higher_order_ops import triton_kernel_wrap
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)


def arguments_added(
    more: Callable[[Any], dict[str, Any]],
) -> contextlib.AbstractContextManager[Any]:
    """Shows PyTorch further arguments of a launch in a block, where it looks which tensors the kernel writes.

    Args:
        more: returns them for a kernel; the launch's own arguments replace them.
    """
    original = triton_kernel_wrap.get_mutated_tensors

    def get_mutated_tensors(
        kernel_idx: int, constant_args_idx: int, kwargs: dict[str, Any], tma_descriptor_metadata: Any
    ) -> list[str]:
        known = more(kernel_side_table.get_kernel(kernel_idx)) | kwargs
        return original(kernel_idx, constant_args_idx, known, tma_descriptor_metadata)

    return mock.patch.object(triton_kernel_wrap, "get_mutated_tensors", get_mutated_tensors)
