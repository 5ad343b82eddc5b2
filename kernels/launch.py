"""What the launchers of all families share: configurations, where kernels run, and what a variant is."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

# Without a GPU kernels run in Triton's interpreter, if the process was started for that.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Results of tuning on a GPU, by device, kernel and shape class; see `tuned`.
TUNED = Path(__file__).with_name("tuned.json")


@dataclass(frozen=True)
class Config:
    """How a kernel is compiled and launched.

    Attributes:
        blocks: its block sizes, by the name of the constant.
        num_warps: of one program.
        num_stages: of its loads.
    """

    blocks: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 1

    def __str__(self) -> str:
        """Block sizes, warps and stages: ``ROWS=4 COLS=512, 4 warps, 1 stages``."""
        sizes = " ".join(f"{name}={size}" for name, size in self.blocks.items())
        return f"{sizes}, {self.num_warps} warps, {self.num_stages} stages"

    def options(self) -> dict[str, int]:
        """What `triton.compile` takes."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class Variant:
    """One form in which a kernel is compiled, checked without a GPU.

    There is one for every configuration and what a segment may have, in fp32 and bf16. Not among them are
    fp16, for which registers are given out otherwise, and calls that leave something out, such as a bias.

    Attributes:
        kernel: a `triton.jit` function.
        signature: type of each argument that is no constant, as Triton writes it (``*fp32``, ``i32``).
        constants: the other arguments, but for block sizes.
        config: block sizes, warps and stages.
        aligned: the arguments that 16 divides, as it does the address of every tensor that PyTorch allocates.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    config: Config
    aligned: Sequence[str] = field(default=())


def has_kernels(*tensors: Tensor | None) -> bool:
    """Whether kernels run where such tensors are."""
    return all(t is None or t.is_cuda or INTERPRETED for t in tensors)


def runs_kernels(*tensors: Tensor | None) -> bool:
    """Whether kernels compute with such tensors; else, and in fp64, which they would round, the reference."""
    return has_kernels(*tensors) and all(t is None or t.dtype != torch.float64 for t in tensors)


def launch(kernel: Any, grid: Sequence[int], config: Config, *arguments: Any, **constants: Any) -> None:
    """Launches a kernel with as many programs as ``grid`` says, so that PyTorch's tracers see it.

    Args:
        kernel: a `triton.jit` function.
        grid: programs along each dimension; with none of them nothing is launched.
        config: block sizes, warps and stages.
        arguments: of the kernel, in order.
        constants: others that are constants, by name.
    """
    if 0 in grid:
        return
    wrapped: Callable[..., Any] = wrap_triton(kernel)[tuple(grid)]
    with _on_device_of(arguments):
        wrapped(*arguments, **constants, **config.blocks, **({} if INTERPRETED else config.options()))


def _on_device_of(arguments: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if not torch.cuda.is_initialized():
        return contextlib.nullcontext()
    return torch.cuda.device_of(next(a for a in arguments if isinstance(a, Tensor)))


def tuned(kernel: str, shape_class: str, default: Config) -> Config:
    """The configuration that tuning found for this GPU, or the default.

    Args:
        kernel: its name.
        shape_class: of the problem, as the family names it.
        default: chosen by shape, without measuring.
    """
    name = f"{kernel} {shape_class}"
    if name in _forced:
        return _forced[name]
    if INTERPRETED or not torch.cuda.is_initialized():
        return default
    return _tuned_for(torch.cuda.current_device()).get(name, default)


_forced: dict[str, Config] = {}


@contextlib.contextmanager
def forced(kernel: str, shape_class: str, config: Config) -> Iterator[None]:
    """Makes `tuned` answer with a configuration that is to be tried."""
    name = f"{kernel} {shape_class}"
    _forced[name] = config
    try:
        yield
    finally:
        del _forced[name]


# Both are asked for by every launch.
@functools.lru_cache
def _tuned_for(device: int) -> dict[str, Config]:
    """By kernel and shape class, for a GPU by its index."""
    found = _read().get(torch.cuda.get_device_name(device), {})
    return {name: Config(**config) for name, config in found.items()}


@functools.lru_cache
def _read() -> dict[str, dict[str, Any]]:
    return dict(json.loads(TUNED.read_text())) if TUNED.exists() else {}


def keep(device: str, kernel: str, shape_class: str, config: Config) -> None:
    """Writes what tuning found into the file that is part of the repository."""
    found = dict(_read())
    own = {**found.get(device, {}), f"{kernel} {shape_class}": vars(config)}
    found[device] = dict(sorted(own.items()))
    TUNED.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
    _read.cache_clear()
    _tuned_for.cache_clear()


def rows_of(tensor: Tensor) -> Tensor:
    """All but the last dimension as one, contiguous: a copy only where it must be."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1]).contiguous()


def next_power_of_2(size: int) -> int:
    """The least power of two that is not below a size."""
    return int(triton.next_power_of_2(size))


def cdiv(a: int, b: int) -> int:
    """How many parts of size ``b`` there are in ``a``."""
    return -(-a // b)
