"""Calls of the CUDA runtime that a mini-batch makes besides its work; run by test_host_calls.py.

`host_call_cases.py OPERATORS NAME...`: runs functions of this file by name, and prints the name of each.
"""

from __future__ import annotations

import torch
from torch import nn

from gpipe_fast import GPipe
from tests.fake_cuda.fake_devices import mark, run_cases
from tests.fake_cuda.train_models import layers_of

MIB = 1 << 20


def a_large_tensor_crosses_pinned_memory() -> None:
    model = GPipe(
        nn.Sequential(*layers_of("large")),
        [2] * 4,
        devices=["cuda:0"] * 4,
        chunks=2,
        transport="pinned",
        capture=False,
    )
    x = torch.randn(4, 12, device="cuda:0")
    for _ in range(2):
        mark("begin")
        with torch.no_grad():
            model(x)
        mark("end")


CASES = (a_large_tensor_crosses_pinned_memory,)

if __name__ == "__main__":
    run_cases({case.__name__: case for case in CASES})
