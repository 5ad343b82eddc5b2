"""Kernel launches as nodes of a graph.

The node of a launch is a call of `launch_kernel`. Its ``meta['val']`` is the tuple of the kernel's outputs,
which `operator.getitem` nodes select.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

# Checks a replacement's launches: called with the tensors that the replaced nodes read, and with all results
# of the launches, which it may overwrite. Returns whether it is done, and need not be called again.
CheckFunction = Callable[[list[Tensor], list[Tensor]], bool]

_FORMATS = {"i1": "?", "u1": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I"}
_FORMATS |= {"i64": "q", "u64": "Q", "fp32": "f", "fp64": "d"}
# The types of numbers that can be arguments.
NUMBER_TYPES = frozenset(_FORMATS)


@dataclass(frozen=True)
class KernelLaunch:
    """A launch of a Triton kernel: everything but its tensors.

    Attributes:
        kernel: the ``triton.jit`` function.
        signature: the name and type of each run-time argument, in order, in Triton's notation (``*bf16``,
            ``i32``).
        constants: the names and values of the compile-time arguments.
        divisible: the numbers that are divisible by 16.
        grid: the number of programs along each dimension.
        num_warps: warps of one program.
        num_stages: software-pipelining stages of its loads.
        outputs: the positions of the arguments that the kernel writes.
        aligned: the positions of the tensors that should be divisible by 16, for a faster form of the kernel.
        contracts: whether a product and a sum may become one operation, which rounds once.
    """

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[str, ...]
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    outputs: tuple[int, ...]
    aligned: tuple[int, ...]
    contracts: bool = True

    @property
    def name(self) -> str:
        """The module and the name of the kernel, as in ``cross_entropy._whole_rows``."""
        module: str = self.kernel.fn.__module__
        return f"{module.rpartition('.')[2]}.{self.kernel.fn.__name__}"

    @property
    def specialization(self) -> Hashable:
        """Everything that a kernel is compiled for, but not its numbers and its grid."""
        types = self.signature, self.constants, self.divisible, self.aligned
        return self.name, *types, self.num_warps, self.num_stages, self.contracts

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


__all__ = ["NUMBER_TYPES", "CheckFunction", "KernelLaunch", "is_launch", "launch_kernel"]
