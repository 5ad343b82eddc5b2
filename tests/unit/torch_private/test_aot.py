"""Patches of the ahead-of-time tracer: they hold in their blocks alone."""

from __future__ import annotations

import torch

from gpipe_fast.torch_private.aot import fused_attention_allowed, patched_reserve_size

NAME = "_get_cudnn_batch_norm_reserve_space_size"


def test_the_reserve_space_is_empty_in_a_block() -> None:
    before = getattr(torch._C, NAME, None)
    with patched_reserve_size():
        assert getattr(torch._C, NAME)(torch.empty(2, 3), True) == 0
    assert getattr(torch._C, NAME, None) is before


def test_attention_does_not_detect_a_trace_in_a_block() -> None:
    module = torch.nn.modules.activation
    before = module._is_make_fx_tracing
    with fused_attention_allowed():
        assert module._is_make_fx_tracing() is False
    assert module._is_make_fx_tracing is before
