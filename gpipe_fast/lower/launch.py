"""Kernel launches as nodes of a graph.

The node of a launch is a call of `launch_kernel`. Its ``meta['val']`` is the tuple of the kernel's outputs,
which `operator.getitem` nodes select. The types of arguments are in Triton's notation.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

# Checks a replacement's launches: called with the tensors that the replaced nodes read, and with all results
# of the launches, which it may overwrite. Returns whether it is done, and need not be called again.
CheckFunction = Callable[[list[Tensor], list[Tensor]], bool]

_ELEMENTS = {
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bool: "u1",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
_FORMATS = {"i1": "?", "u1": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I"}
_FORMATS |= {"i64": "q", "u64": "Q", "fp32": "f", "fp64": "d"}
# The types of numbers that can be arguments.
NUMBER_TYPES = frozenset(_FORMATS)


@dataclass(frozen=True)
class KernelSource:
    """A kernel to compile: everything of a launch except its grid and its numbers.

    Attributes:
        kernel: a `triton.jit` function.
        signature: name and type of every run-time argument, in the kernel's order, as in ``*bf16``, ``i32``.
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

    @property
    def identity(self) -> Hashable:
        """What differs between kernels that are compiled to different code."""
        types = self.signature, self.constants, self.divisible
        # A text, because 1, 1.0 and True are equal.
        return self.kernel.fn, repr((*types, self.num_warps, self.num_stages, self.contracts))


@dataclass(frozen=True)
class KernelLaunch(KernelSource):
    """A launch of a Triton kernel: everything but its tensors.

    Attributes:
        grid: the number of programs along each dimension.
        outputs: the positions of the arguments that the kernel writes.
        aligned: the positions of the tensors that should be divisible by 16, for a faster form of the kernel;
            they are not in ``divisible``.
    """

    grid: tuple[int, int, int] = field(kw_only=True)
    outputs: tuple[int, ...] = field(kw_only=True)
    aligned: tuple[int, ...] = field(kw_only=True)

    @property
    def name(self) -> str:
        """The module and the name of the kernel, as in ``cross_entropy._whole_rows``."""
        module: str = self.kernel.fn.__module__
        return f"{module.rpartition('.')[2]}.{self.kernel.fn.__name__}"

    @property
    def specialization(self) -> Hashable:
        """Everything that a kernel is compiled for, but not its numbers and its grid."""
        return self.identity, self.aligned

    def pack(self, position: int, number: float) -> bytes:
        """Returns a number's bytes as the kernel's argument at this position."""
        return struct.pack(_FORMATS[self.signature[position][1]], number)


def launch_kernel(
    launch: KernelLaunch,
    arguments: Sequence[Tensor | float | None],
    check: CheckFunction | None = None,
    checked: Sequence[Tensor] = (),
    earlier: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """The target of a launch's node; it is lowered, never called.

    Args:
        launch: the launch.
        arguments: the run-time arguments. In the place of an output stands None or, if the kernel also reads
            what it writes, the tensor whose copy it changes.
        check: a function to call after the launch until it is done; see `CheckFunction`.
        checked: the tensors that the check reads.
        earlier: results of earlier launches that are checked together with this launch's.
    """
    raise NotImplementedError("the node of a launch is lowered, not called")


def is_launch(node: fx.Node) -> bool:
    """Returns whether a node launches a kernel."""
    return node.op == "call_function" and node.target is launch_kernel


def changed_input(node: fx.Node, output: int) -> fx.Node | None:
    """Returns the tensor whose copy a kernel changes to an output; None if it only writes the output."""
    if not is_launch(node):
        return None
    launch, arguments, *_ = node.args
    assert isinstance(launch, KernelLaunch)
    assert isinstance(arguments, (list, tuple))
    initial = arguments[launch.outputs[output]]
    return initial if isinstance(initial, fx.Node) else None


def pointer_type(dtype: torch.dtype, constant: bool = False) -> str:
    """Returns the type of a tensor, such as ``*bf16``; "" if Triton has none for the dtype.

    Args:
        dtype: the tensor's dtype.
        constant: whether the kernel only reads the tensor.
    """
    element = _ELEMENTS.get(dtype, "")
    return element and f"*{'k' * constant}{element}"


def number_type(value: float) -> str:
    """Returns the type that Triton's own launcher gives a number."""
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, float):
        return "fp32"
    if -(2**31) <= value < 2**31:
        return "i32"
    return "i64" if value < 2**63 else "u64"


def is_divisible(value: object) -> bool:
    """Returns whether Triton's own launcher compiles for a number that is divisible by 16."""
    return type(value) is int and value % 16 == 0
