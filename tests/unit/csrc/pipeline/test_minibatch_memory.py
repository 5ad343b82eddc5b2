"""What errors say about a mini-batch's memory: injected ones of the allocator and of a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from tests.internals import inject_failure, remove_faults


def layers(number: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(number)))


def test_an_injected_out_of_memory_error_reports_memory_use() -> None:
    """The error keeps its type, and the next call works."""
    pipe = GPipe(layers(4), [2, 2], devices=["cpu"] * 2, chunks=4)
    x = torch.randn(8, 4)
    pipe(x).sum().backward()
    for action, step in (("1F2", lambda: pipe(x)), ("0B1", lambda: pipe(x).sum().backward())):
        inject_failure(pipe, action, "OutOfMemoryError", after=1)
        message = (
            rf"injected OutOfMemoryError \(in action {action}: .*; stage {action[0]} on cpu holds 160 bytes "
            r"of parameters, .* 32 bytes of boundary tensors for each of 4 micro-batches "
            r"\(128 bytes in total\)"
        )
        with pytest.raises(torch.OutOfMemoryError, match=message):
            step()
        remove_faults(pipe)
        pipe(x).sum().backward()


@pytest.mark.parametrize("action", ["1F2", "0B1"])
def test_an_injected_gpu_error_keeps_its_type(action: str) -> None:
    pipe = GPipe(layers(4), [2, 2], devices=["cpu"] * 2, chunks=4)
    inject_failure(pipe, action, "AcceleratorError", after=1)
    with pytest.raises(
        torch.AcceleratorError, match=rf"injected AcceleratorError \(in action {action}: stage"
    ):
        pipe(torch.randn(8, 4)).sum().backward()
    remove_faults(pipe)
    pipe(torch.randn(8, 4)).sum().backward()
