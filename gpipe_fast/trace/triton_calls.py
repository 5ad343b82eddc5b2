"""Users' Triton kernels in a trace: `torch.library.wrap_triton` makes a kernel's launch a node of the graph.

PyTorch's node refers to side tables, whose indices differ between equal traces. `read_triton_calls` replaces
it by a call of `call_triton_kernel`, which holds everything itself.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from gpipe_fast.randomness.random import KeyedRandomMode
from gpipe_fast.strides import empty_like
from gpipe_fast.torch_private.triton_wrap import (
    arguments_added,
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from gpipe_fast.trace.fake import RealLayouts


@dataclass(frozen=True)
class TritonCall:
    """A user's launch of a Triton kernel: everything but its arguments and its grid.

    Attributes:
        kernel: what the user launches: a ``triton.jit`` function, or an autotuner around one.
        identity: equal for equal kernels; an autotuner may be made anew by each trace.
        names: the names of the arguments that the launch passes.
        written: the names of the tensors that the kernel writes.
        constants: further arguments, which no node can hold, such as Triton's dtypes.
    """

    kernel: Any = field(repr=False, compare=False)
    identity: str
    names: tuple[str, ...]
    written: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]

    @property
    def function(self) -> Any:
        """The ``triton.jit`` function."""
        return _function_of(self.kernel)

    @property
    def name(self) -> str:
        """The kernel's name in its source."""
        return str(self.function.fn.__name__)

    def launch(self, grids: Sequence[Any], arguments: dict[str, Any]) -> None:
        """Launches the kernel on real tensors; an autotuner tunes it if it has not done so."""
        triton_kernel_wrapper_mutation(
            kernel_idx=kernel_side_table.add_kernel(self.kernel),
            constant_args_idx=kernel_side_table.add_constant_args(dict(self.constants)),
            grid=list(grids),
            tma_descriptor_metadata={},
            kwargs=arguments,
        )


def call_triton_kernel(
    call: TritonCall, grids: Sequence[Any], arguments: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """The target of the node of a launch; it is replaced, never called.

    Args:
        call: the kernel.
        grids: the grid for each of the autotuner's configurations, or the one grid.
        arguments: the arguments that ``call.names`` names.

    Returns:
        The new contents of ``call.written``.
    """
    raise NotImplementedError("the node of a kernel's launch is replaced, not called")


def is_triton_call(node: fx.Node) -> bool:
    """Returns whether a node launches a user's kernel."""
    return node.op == "call_function" and node.target is call_triton_kernel


def read_triton_calls(graph: fx.Graph) -> None:
    """Replaces PyTorch's nodes for launches by calls of `call_triton_kernel`, in place."""
    for node in list(graph.nodes):
        if node.target is not triton_kernel_wrapper_functional:
            continue
        given: dict[str, Any] = dict(node.kwargs)
        kernel = kernel_side_table.get_kernel(given["kernel_idx"])
        constants = kernel_side_table.get_constant_args(given["constant_args_idx"])
        arguments = given["kwargs"]
        call = TritonCall(
            kernel,
            _identity(kernel),
            tuple(arguments),
            tuple(name for name in arguments if name in given["tensors_to_clone"]),
            tuple(constants.items()),
        )
        values: tuple[Any, ...] = (call, given["grid"], tuple(arguments.values()))
        with graph.inserting_before(node):
            made = graph.call_function(call_triton_kernel, values)
        made.meta = {**node.meta, "val": tuple(arguments[name].meta["val"] for name in call.written)}
        for user in list(node.users):
            assert user.target is operator.getitem
            user.args = (made, call.written.index(user.args[1]))
        graph.erase_node(node)


def _function_of(kernel: Any) -> Any:
    while hasattr(kernel.fn, "fn"):  # an autotuner
        kernel = kernel.fn
    return kernel


def _identity(kernel: Any) -> str:
    configurations = "; ".join(map(str, getattr(kernel, "configs", ())))
    return f"{id(_function_of(kernel))} {configurations}"


def default_arguments_known() -> contextlib.AbstractContextManager[None]:
    """Makes PyTorch, which looks which tensors a kernel writes, know the defaults of its other arguments.

    Otherwise it assumes that a kernel with defaults writes every tensor that it gets, parameters included.
    """
    return arguments_added(
        lambda kernel: {p.name: p.default for p in _function_of(kernel).params if p.has_default}
    )


def pass_launches_through(mode: type, around: Callable[[Any], Any]) -> None:
    """Makes launches that a user does not put into an operator pass a dispatch mode.

    Args:
        mode: the class of the mode.
        around: returns a context manager, around the launch, for an object of this class.
    """

    def launch(self: Any, **given: Any) -> None:
        with around(self):
            triton_kernel_wrapper_mutation(**given)

    triton_kernel_wrapper_mutation.py_impl(mode)(launch)


pass_launches_through(KeyedRandomMode, lambda mode: contextlib.nullcontext())


@triton_kernel_wrapper_mutation.py_impl(RealLayouts)
def _fake_launch_in_place(mode: RealLayouts, **given: Any) -> None:
    return None


@triton_kernel_wrapper_functional.py_impl(RealLayouts)
def _fake_launch(mode: RealLayouts, **given: Any) -> dict[str, Tensor]:
    with mode:
        return {
            name: empty_like(t) for name, t in given["kwargs"].items() if name in given["tensors_to_clone"]
        }
