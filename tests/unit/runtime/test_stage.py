"""Modes of PyTorch that programs are specialised on: a call under other modes gets its own programs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpipe_fast import GPipe
from gpipe_fast.runtime.stage import TorchModes
from tests.reference import loop_step, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_programs_depend_on_the_enabled_attention_kernels() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), Attention()), torch.randn(4, 2, 33, 16)
    pipe = GPipe(model, [1, 1], chunks=2)
    default = loop_step(model, x, 2)
    assert unequal(pipeline_step(pipe, x), default) == []
    with sdpa_kernel(SDPBackend.MATH):
        mathematical = loop_step(model, x, 2)
        assert unequal(mathematical, default) != []
        assert unequal(pipeline_step(pipe, x), mathematical) == []
    assert unequal(pipeline_step(pipe, x), default) == []


def test_settings_that_select_operators_are_modes() -> None:
    backends, before = torch.backends, TorchModes.now()
    with backends.cudnn.flags(enabled=not backends.cudnn.enabled):
        assert TorchModes.now() != before
    for on, set_to in (
        (backends.cuda.cudnn_sdp_enabled(), backends.cuda.enable_cudnn_sdp),
        (backends.mha.get_fastpath_enabled(), backends.mha.set_fastpath_enabled),
    ):
        set_to(not on)
        changed = TorchModes.now()
        set_to(on)
        assert changed != before == TorchModes.now()


def test_a_retraced_backward_uses_the_attention_kernels_of_its_forward() -> None:
    """The gradient's unexpected layout causes a new trace, with the loss outside of ``sdpa_kernel``."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), Attention()), torch.randn(4, 2, 33, 16)
    pipe = GPipe(model, [2], chunks=2)
    gradients = []
    for run in (pipe, lambda x: torch.cat([model(part) for part in x.chunk(2)])):
        with sdpa_kernel(SDPBackend.MATH):
            y = run(x)
        y.transpose(1, 3).contiguous().square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        model.zero_grad()
    assert all(map(torch.equal, *gradients))
