"""Illegal accesses at many places of a step; run by test_robustness.py with the fake runtime preloaded.

`illegal_accesses.py OPERATORS DEVICES TRANSPORT STEPS BEGIN END STRIDE`: for every STRIDE-th operation from
BEGIN to END of the step after STEPS steps, a process in which that operation accesses memory illegally, so
that every later call fails. The step and the next one must raise; then all tensors are freed. Prints the
numbers of the operations whose process ended otherwise, and "done". A segmentation fault counts as an end
by PyTorch: its allocator may read an event that another thread moved before its query failed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys

import pytest

# Imported before the fork, to save time; gpipe_fast is not, because it asks for GPUs.
import torch
import torch._dynamo
import torch._functorch.aot_autograd
from torch import nn

BATCH, WIDTH, CHUNKS = 16, 12, 4


def run_steps(operators: str, devices: list[str], transport: str, steps: int, number: int) -> None:
    from gpipe_fast import GPipe
    from tests.fake_cuda.train_models import layers_of

    torch.ops.load_library(operators)
    torch.backends.cudnn.enabled = False
    torch.set_num_threads(1)
    model = GPipe(
        nn.Sequential(*layers_of("skips")),
        [2] * 4,
        devices=devices,
        chunks=CHUNKS,
        checkpoint="except_last",
        transport=transport,
    )

    for _ in range(steps):
        step(model, devices[0])
    runtime = ctypes.CDLL(None)
    runtime.fake_cuda_plant(b"sticky", int(number))
    runtime.fake_cuda_mark(b"begin")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            step(model, devices[0])
    del model
    gc.collect()


def step(model: nn.Module, device: str) -> None:
    y = model(torch.randn(BATCH, WIDTH).to(device).requires_grad_())
    y.square().sum().backward()
    for parameter in model.parameters():
        parameter.grad = None


def main() -> None:
    operators, devices, transport, steps, *numbers = sys.argv[1:]
    for number in range(*map(int, numbers)):
        pid = os.fork()
        if pid == 0:
            run_steps(operators, devices.split(","), transport, int(steps), number)
            return
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status not in (0, -signal.SIGSEGV):
            print(f"operation {number}: {status}", flush=True)
    print("done")


if __name__ == "__main__":
    main()
