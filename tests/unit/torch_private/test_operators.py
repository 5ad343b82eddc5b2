"""Operators: PyTorch's decompositions are removed in a block, and kernels are patched."""

from __future__ import annotations

import torch

from gpipe_fast.torch_private.operators import (
    DispatchKey,
    call_composite,
    foreach_norm,
    function_names,
    has_kernel,
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


def test_a_composite_operator_is_called_in_cpp() -> None:
    x = torch.randn(3, 4)
    assert torch.equal(call_composite(aten.linear.default, x, x), torch.nn.functional.linear(x, x))


def test_kernels_are_found_by_name() -> None:
    assert has_kernel("aten::linear", "CompositeImplicitAutograd")
    assert not has_kernel("aten::sin", "CompositeImplicitAutograd")
    assert {"sin", "embedding"} <= set(function_names())


def test_the_norms_are_those_of_each_tensor() -> None:
    tensors = [torch.ones(4), torch.full((9,), 2.0)]
    assert [norm.item() for norm in foreach_norm(tensors)] == [2, 6]
