"""Fake tensors and sizes that are symbols, the tensors of functionalization, those of subclasses, and bits.

Read in PyTorch 2.11.0 and 2.14.1.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._subclasses import FakeTensor
from torch._subclasses import FakeTensorMode as _FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._sympy.printers import PythonPrinter

# What a fake mode raises where elements of a tensor are read, or where a shape follows from them.
READS_ELEMENTS = DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode

# Where a fake mode reports an operator that raised.
_logger = logging.getLogger("torch._subclasses.fake_tensor")


class FakeTensorMode(_FakeTensorMode):
    """PyTorch's fake mode, whose product of groups takes float32, as the real kernels do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32:
            with self:
                return _empty_grouped_mm(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _empty_grouped_mm(
    mat1: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    found: Tensor = _create_grouped_mm_output_tensor(mat1, mat2, offs, out_dtype)
    return found


def logging_disabled() -> contextlib.AbstractContextManager[Any]:
    """Keeps fake modes from logging an operator that raised; the caller handles the error."""
    return mock.patch.object(_logger, "disabled", True)


def from_meta(mode: FakeTensorMode, meta: Tensor, device: torch.device) -> Tensor:
    """Returns a fake tensor on a device with the metadata of a meta tensor."""
    found: Tensor = mode.fake_tensor_converter.from_meta_and_device(mode, meta, device)
    return found


def python_of(expression: Any) -> str:
    """Returns an expression of symbols as Python code.

    Raises:
        Exception: it has a function that has no code.
    """
    found: str = PythonPrinter().doprint(expression)
    return found


def is_traced(tensor: Tensor) -> bool:
    """Returns whether a tensor is one that a trace follows, fake or functional."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor)) or torch._is_functional_tensor(tensor)


# Lets fake tensors be on a GPU that is not there. A fake mode calls it, too; but in PyTorch 2.11 what the
# first call sets goes with its thread, and a fake mode in another thread then crashes.
set_stand_in_for_cuda = torch._C._ensureCUDADeviceGuardSet
# Set whether a tensor's elements are conjugated, or negated, when they are read.
set_conj, set_neg = torch._C._set_conj, torch._C._set_neg
make_subclass = Tensor._make_subclass
swap_tensor_impl = torch._C._swap_tensor_impl
