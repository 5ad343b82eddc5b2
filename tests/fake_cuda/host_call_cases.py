"""Calls of the CUDA runtime that a mini-batch makes besides its work; run by test_host_calls.py.

`host_call_cases.py OPERATORS NAME...`: runs functions of this file by name, and prints the name of each.
"""

from __future__ import annotations

import ctypes
import gc

import torch
from torch import nn

from gpipe_fast import GPipe
from tests.fake_cuda.fake_devices import run_cases

CHUNKS, WIDTH, MIB = 2, 8, 1 << 20
INVALID_DEVICE = 101


def runtime() -> ctypes.CDLL:
    found = ctypes.CDLL(None)
    found.fake_cuda_num_events.restype = ctypes.c_long
    return found


def pipeline(capture: bool = False) -> tuple[GPipe, torch.Tensor]:
    model = GPipe(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), [1] * 4, chunks=CHUNKS, capture=capture
    )
    return model, torch.randn(4, WIDTH, device="cuda:0")


def a_mini_batch_creates_no_events() -> None:
    """Those of earlier mini-batches are used again. PyTorch's engine creates some in a backward."""
    model, x = pipeline()
    for _ in range(8):
        before = runtime().fake_cuda_num_events()
        with torch.no_grad():
            model(x)
        created = runtime().fake_cuda_num_events() - before
        outputs = [model(x), model.step(x, loss_fn=torch.sum, normalizer=1)]
        outputs[0].sum().backward()
        before = runtime().fake_cuda_num_events()
        outputs.clear()
        gc.collect()
        created += runtime().fake_cuda_num_events() - before
    assert created == 0


def a_mini_batch_keeps_the_errors_of_earlier_calls() -> None:
    """An error that does not stop the device, such as that of a launch, is for those who look for it."""
    model, x = pipeline()
    for ends in (lambda y: y.sum().backward(), lambda y: None):
        output = model(x)
        ends(output)
        assert runtime().cudaSetDevice(99) == INVALID_DEVICE
        del output
        gc.collect()
        assert runtime().cudaGetLastError() == INVALID_DEVICE


CASES = (
    a_mini_batch_creates_no_events,
    a_mini_batch_keeps_the_errors_of_earlier_calls,
)

if __name__ == "__main__":
    run_cases({case.__name__: case for case in CASES})
