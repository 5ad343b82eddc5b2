"""PyTorch's settings: those that a trace depends on, and those that a captured graph depends on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from gpipe_fast._extension import all_settings, operator_settings

CUDA, CUDNN = torch.backends.cuda, torch.backends.cudnn

# Getter and setter of each setting. These decide which operators are called, the others how they compute.
OPERATOR_SETTINGS: dict[str, tuple[Callable[[], object], Callable[[bool], object]]] = {
    "flash attention": (CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp),
    "memory-efficient attention": (CUDA.mem_efficient_sdp_enabled, CUDA.enable_mem_efficient_sdp),
    "mathematical attention": (CUDA.math_sdp_enabled, CUDA.enable_math_sdp),
    "cuDNN's attention": (CUDA.cudnn_sdp_enabled, CUDA.enable_cudnn_sdp),
    "sums in 16 bits of attention": (
        CUDA.fp16_bf16_reduction_math_sdp_allowed,
        CUDA.allow_fp16_bf16_reduction_math_sdp,
    ),
    "cuDNN": (lambda: CUDNN.enabled, lambda on: setattr(CUDNN, "enabled", on)),
}
NUMERIC_SETTINGS: dict[str, tuple[Callable[[], object], Callable[[bool], object]]] = {
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "deterministic cuDNN": (lambda: CUDNN.deterministic, lambda on: setattr(CUDNN, "deterministic", on)),
    "benchmarks": (lambda: CUDNN.benchmark, lambda on: setattr(CUDNN, "benchmark", on)),
    "TF32 of cuDNN": (lambda: CUDNN.allow_tf32, lambda on: setattr(CUDNN, "allow_tf32", on)),
    **{
        name: (partial(getattr, CUDA.matmul, name), partial(setattr, CUDA.matmul, name))
        for name in (
            "allow_tf32",
            "allow_bf16_reduced_precision_reduction",
            "allow_fp16_reduced_precision_reduction",
            "allow_fp16_accumulation",
        )
    },
}


@pytest.mark.parametrize("name", OPERATOR_SETTINGS | NUMERIC_SETTINGS)
def test_settings_that_select_operators_affect_traces_and_all_affect_graphs(name: str) -> None:
    """A trace is valid for both values of the others; a captured graph is not."""
    get, set_to = (OPERATOR_SETTINGS | NUMERIC_SETTINGS)[name]
    before, on = (operator_settings(), all_settings()), bool(get())
    set_to(not on)
    try:
        assert (operator_settings() != before[0]) == (name in OPERATOR_SETTINGS)
        assert all_settings() != before[1]
    finally:
        set_to(on)
    assert operator_settings() == before[0]


def test_the_order_of_attention_kernels_affects_traces() -> None:
    before, order = operator_settings(), torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(order[::-1])
    try:
        assert operator_settings() != before
    finally:
        torch._C._set_sdp_priority_order(order)
    assert operator_settings() == before


def test_the_precision_of_single_cudnn_operators_affects_graphs() -> None:
    """After such a change, PyTorch refuses to report one precision for all of cuDNN."""
    before = all_settings()
    precision = CUDNN.conv.fp32_precision
    CUDNN.conv.fp32_precision = "ieee"
    try:
        assert all_settings() != before
    finally:
        CUDNN.conv.fp32_precision = precision
