"""What the programs of this folder share: they load the fake devices' operators, and run cases by name."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import gpipe_fast  # noqa: F401  registers operators that the library replaces

FOUR_DEVICES, ONE_DEVICE, WITH_CPU = (
    "cuda:0,cuda:1,cuda:2,cuda:3",
    "cuda:1,cuda:1,cuda:1,cuda:1",
    "cuda:0,cpu,cuda:0,cuda:1",
)


def load(operators: str, *, deterministic: bool = True) -> None:
    """Loads the operators, and turns off what they lack. By default, addmm has the bits of the plain loop."""
    torch.ops.load_library(operators)
    torch.backends.cudnn.enabled = False
    for enable in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"):
        getattr(torch.backends.cuda, enable)(False)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(deterministic)


def run_cases(cases: dict[str, Callable[[], object]], *, deterministic: bool = True) -> None:
    """Runs the cases that the command line names after OPERATORS, and prints their results or names."""
    operators, *names = sys.argv[1:]
    load(operators, deterministic=deterministic)
    for name in names:
        torch.manual_seed(0)
        found = cases[name]()
        print(name if found is None else found, flush=True)


def mark(text: str) -> None:
    """Writes a mark into the log; real GPUs have none."""
    getattr(ctypes.CDLL(None), "fake_cuda_mark", lambda text: None)(text.encode())


def caller_streams(devices: Sequence[str]) -> contextlib.ExitStack:
    """Enters a new stream on each GPU."""
    stack = contextlib.ExitStack()
    for device in sorted({*devices} - {"cpu"}):
        stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
    return stack


def plain_loop(model: nn.Module, x: Tensor, chunks: int) -> Tensor:
    return torch.cat([model(part) for part in x.chunk(chunks)])


def gradients(model: nn.Module, output: Tensor) -> list[Tensor]:
    """Returns the gradients of the sum of squares, on the CPU."""
    model.zero_grad()
    output.square().sum().backward()
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def copied(layers: Sequence[nn.Module]) -> nn.Sequential:
    return nn.Sequential(*copy.deepcopy([*layers]))
