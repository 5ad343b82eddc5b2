"""Shared parts of all kernel launchers: configurations, variants and device checks."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

# Whether kernels run in Triton's interpreter, on the CPU. The environment must be set at process start.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# A kernel that sums rows starts programs by the number of multiprocessors: as many as fill each of them with
# this many warps. An H200 needs about 25 KB in flight on each to load at 4.8 TB/s with 0.7 microseconds of
# latency; 32 warps that load two tensors of bf16, 8 elements a thread, have 32 KB. Partial sums of fewer
# rows than this would be a large part of the bytes, so programs for few rows are fewer.
WARPS_PER_MULTIPROCESSOR, ROWS_PER_PARTIAL_SUM = 32, 16
# The multiprocessors of an H100, assumed where bytes are counted with meta tensors; and those of the
# interpreter, where each operation of each program takes as long.
DEFAULT_MULTIPROCESSORS, INTERPRETER_MULTIPROCESSORS = 132, 4


@dataclass(frozen=True)
class Config:
    """A launch configuration: the compile-time parameters of a kernel.

    Attributes:
        blocks: block sizes by the name of the kernel's constant.
        num_warps: warps of one program.
        num_stages: software-pipelining stages of its loads.
        contracts: whether a product and a sum may become one operation, which rounds once.
    """

    blocks: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 1
    contracts: bool = True

    def __str__(self) -> str:
        """Formats block sizes, warps and stages: ``ROWS=4 COLS=512, 4 warps, 1 stages``."""
        sizes = " ".join(f"{name}={size}" for name, size in self.blocks.items())
        return f"{sizes}, {self.num_warps} warps, {self.num_stages} stages"

    def options(self) -> dict[str, int]:
        """Returns the options for `triton.compile`."""
        found = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return found if self.contracts else {**found, "enable_fp_fusion": False}


def choose(configs: Mapping[int, Config], num_cols: int) -> Config:
    """Returns the first configuration, by the maximum number of columns, that is wide enough."""
    return next(config for width, config in configs.items() if num_cols <= width)


def uses_kernels(*tensors: Tensor | None) -> bool:
    """Returns whether kernels compute on these tensors. The reference computes fp64, which kernels round."""
    given = [t for t in tensors if t is not None]
    return all((t.is_cuda or INTERPRETED) and t.dtype != torch.float64 for t in given)


def launch(kernel: Any, grid: Sequence[int], config: Config, *arguments: Any, **constants: Any) -> None:
    """Launches a kernel in a way that PyTorch's tracers record.

    Args:
        kernel: a `triton.jit` function.
        grid: the number of programs along each dimension. A zero means that nothing is launched.
        config: the launch configuration.
        arguments: the kernel's arguments, in order.
        constants: the kernel's constants by name, except block sizes.
    """
    if 0 in grid:
        return
    recorder = _recorder.get()
    if recorder is not None:
        recorder(kernel, tuple(grid), config, arguments, constants)
        return
    wrapped: Callable[..., Any] = wrap_triton(kernel)[tuple(grid)]
    with _device_guard(arguments):
        wrapped(*arguments, **constants, **config.blocks, **({} if INTERPRETED else config.options()))


# Receives launches in place of the GPU; see `recording_launches`.
Recorder = Callable[[Any, tuple[int, ...], Config, tuple[Any, ...], dict[str, Any]], None]
_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


@contextlib.contextmanager
def recording_launches(recorder: Recorder) -> Iterator[None]:
    """Makes `launch` call ``recorder`` in place of launching, in this thread.

    Args:
        recorder: receives the kernel, the grid, the configuration, the arguments in order, and the constants
            by name (without the configuration's block sizes). A launch with an empty grid is not recorded.
    """
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def _device_guard(arguments: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensors' device current for a launch: Triton launches on the current device."""
    if not torch.cuda.is_initialized():
        return contextlib.nullcontext()
    return torch.cuda.device_of(next(a for a in arguments if isinstance(a, Tensor)))


def num_multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU; an assumed one for a device that the machine lacks."""
    if device.type == "cpu":
        return INTERPRETER_MULTIPROCESSORS
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        return DEFAULT_MULTIPROCESSORS
    found: int = torch.cuda.get_device_properties(device).multi_processor_count
    return found


def num_partial_sums(num_rows: int, col_blocks: int, num_warps: int, device: torch.device) -> int:
    """Returns how many programs should share the rows of a block of columns, if each writes their sums.

    All blocks of columns together have a multiple of the multiprocessors, or nearly, and one for each at
    least, so that all of these end at the same time.

    Args:
        num_rows: the number of rows.
        col_blocks: the number of blocks of columns.
        num_warps: the warps of a program.
        device: the device of the rows.
    """
    multiprocessors = num_multiprocessors(device)
    most = max(1, WARPS_PER_MULTIPROCESSOR // num_warps)
    worthwhile = round(num_rows * col_blocks / (ROWS_PER_PARTIAL_SUM * multiprocessors))
    return max(1, min(most, max(1, worthwhile)) * multiprocessors // col_blocks)


def flatten_rows(tensor: Tensor) -> Tensor:
    """Returns a contiguous matrix with all but the last dimension flattened. Copies only if necessary."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1]).contiguous()


def next_power_of_2(size: int) -> int:
    """Returns the smallest power of two that is at least ``size``."""
    return int(triton.next_power_of_2(size))


def cdiv(a: int, b: int) -> int:
    """Returns ``a / b``, rounded up."""
    return -(-a // b)
