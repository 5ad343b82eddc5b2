"""Operators: PyTorch's decompositions are removed in a block, and kernels are patched."""

from __future__ import annotations

import torch

from gpipe_fast.torch_private.operators import (
    DispatchKey,
    patched_kernel,
    without_python_decompositions,
)

aten = torch.ops.aten
KEY = DispatchKey.CompositeImplicitAutograd


def test_decompositions_are_removed_in_a_block_and_come_back() -> None:
    overload = aten.upsample_nearest1d.vec
    before = dict(overload.py_kernels)
    assert KEY in before
    kept = dict(aten.native_batch_norm.default.py_kernels)
    with without_python_decompositions():
        assert KEY not in overload.py_kernels
        assert aten.native_batch_norm.default.py_kernels == kept
    assert overload.py_kernels == before


def test_a_kernel_is_patched_in_a_block() -> None:
    overload, key = aten.sin.default, DispatchKey.CPU
    before = dict(overload.py_kernels)
    with patched_kernel(overload, key, lambda x: x + 1):
        assert overload.py_kernels[key](1) == 2
        with patched_kernel(overload, key, None):
            assert key not in overload.py_kernels
        assert overload.py_kernels[key](1) == 2
    assert overload.py_kernels == before
