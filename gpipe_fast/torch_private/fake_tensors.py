"""Fake tensors and sizes that are symbols, the tensors of functionalization, those of subclasses, and bits.

Read in PyTorch 2.11.0 and 2.14.1.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.printers import PythonPrinter

# Where a fake mode reports an operator that raised.
_logger = logging.getLogger("torch._subclasses.fake_tensor")


@contextlib.contextmanager
def logging_disabled() -> Iterator[None]:
    """Keeps fake modes from logging an operator that raised; the caller handles the error."""
    before = _logger.disabled
    _logger.disabled = True
    try:
        yield
    finally:
        _logger.disabled = before


def from_meta(mode: FakeTensorMode, meta: Tensor, device: torch.device) -> Tensor:
    """Returns a fake tensor on a device with the metadata of a meta tensor."""
    found: Tensor = mode.fake_tensor_converter.from_meta_and_device(mode, meta, device)
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
make_wrapper_subclass = Tensor._make_wrapper_subclass
swap_tensor_impl = torch._C._swap_tensor_impl
