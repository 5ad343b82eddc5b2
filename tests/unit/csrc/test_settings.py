"""PyTorch's settings are noticed: what a trace depends on, and what a captured graph depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from gpipe_fast._extension import choices_now, settings_now

CUDA, CUDNN = torch.backends.cuda, torch.backends.cudnn

# How each is read and set. The first ones decide which operators are called.
CHOICES: dict[str, tuple[Callable[[], object], Callable[[bool], object]]] = {
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
OTHERS: dict[str, tuple[Callable[[], object], Callable[[bool], object]]] = {
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


@pytest.fixture
def changed(request: pytest.FixtureRequest) -> Iterator[tuple[bytes, bytes]]:
    """Changes a setting for the test; what the two were before."""
    get, set_to = (CHOICES | OTHERS)[request.param]
    before, on = (choices_now(), settings_now()), bool(get())
    set_to(not on)
    yield before
    set_to(on)
    assert choices_now() == before[0]


@pytest.mark.parametrize("changed", CHOICES, indirect=True)
def test_what_chooses_operators(changed: tuple[bytes, bytes]) -> None:
    assert choices_now() != changed[0]
    assert settings_now() != changed[1]


@pytest.mark.parametrize("changed", OTHERS, indirect=True)
def test_what_chooses_how_they_compute(changed: tuple[bytes, bytes]) -> None:
    """A trace serves both; a captured graph does not."""
    assert choices_now() == changed[0]
    assert settings_now() != changed[1]


def test_the_order_of_attention_kernels() -> None:
    before, order = choices_now(), torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(order[::-1])
    try:
        assert choices_now() != before
    finally:
        torch._C._set_sdp_priority_order(order)
    assert choices_now() == before


def test_precision_of_single_operators() -> None:
    """Where it was set for some of cuDNN's alone, PyTorch refuses to tell what it is for all."""
    before = settings_now()
    precision = CUDNN.conv.fp32_precision
    CUDNN.conv.fp32_precision = "ieee"
    try:
        assert settings_now() != before
    finally:
        CUDNN.conv.fp32_precision = precision
