"""A kernel to compile and what the compiler returns: machine code, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelSource:
    """A kernel to compile: everything of a launch except its grid and its numbers.

    Attributes:
        kernel: a `triton.jit` function.
        signature: name and type of every run-time argument, in the kernel's order. Types are in Triton's
            notation: ``*bf16``, ``i32``.
        constants: name and value of every constexpr argument: bool, int, float, str or None.
        divisible: the run-time arguments that are divisible by 16, including pointers.
        num_warps: warps of one program.
        num_stages: software-pipelining stages of its loads.
        contracts: whether a product and a sum may become one operation, which rounds once.
    """

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[str, ...]
    num_warps: int
    num_stages: int
    contracts: bool = True


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel.

    Attributes:
        image: the machine code, an ELF file.
        name: the kernel's name in the image.
        num_warps: warps of one program.
        num_ctas: thread blocks of one program.
        shared: bytes of dynamic shared memory of one program.
        cooperative: whether all programs must run at the same time.
        launch_pdl: whether the kernel waits for the previous one itself (programmatic dependent launch).
    """

    image: bytes
    name: str
    num_warps: int
    num_ctas: int
    shared: int
    cooperative: bool
    launch_pdl: bool


@dataclass(frozen=True)
class CompileFailure:
    """The reason why a kernel has no machine code, in one paragraph."""

    reason: str
