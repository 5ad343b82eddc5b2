"""Launches of users' Triton kernels: further arguments that PyTorch is shown in a block."""

from __future__ import annotations

from typing import Any

import pytest
from torch._higher_order_ops import triton_kernel_wrap

from gpipe_fast.torch_private.triton_wrap import arguments_added, kernel_side_table


def test_arguments_are_added_in_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def mutated(kernel: int, constants: int, kwargs: dict[str, Any], descriptors: Any) -> list[str]:
        seen.append(kwargs)
        return []

    monkeypatch.setattr(triton_kernel_wrap, "get_mutated_tensors", mutated)
    index = kernel_side_table.add_kernel(object())
    with arguments_added(lambda kernel: {"size": 1, "scale": 2}):
        triton_kernel_wrap.get_mutated_tensors(index, 0, {"size": 7}, {})
    assert seen == [{"size": 7, "scale": 2}]
    assert triton_kernel_wrap.get_mutated_tensors is mutated
