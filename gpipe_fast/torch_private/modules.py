"""Modules: their global hooks, how a module is called, what all batch norms are.

Read in PyTorch 2.11.0 and 2.14.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _module
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm

# The Python functions that the call of a module runs.
CALLS: tuple[Any, ...] = (nn.Module.__call__, nn.Module._call_impl, nn.Module._wrapped_call_impl)

# The attribute of a module in which DistributedDataParallel looks for names of tensors to ignore.
IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"


def global_hooks(name: str) -> dict[int, Any]:
    """Returns the table of global hooks that belongs to a module's table, such as ``_forward_hooks``.

    PyTorch never replaces a table.
    """
    found: dict[int, Any] = getattr(_module, f"_global{name}")
    return found


def parse_to(*args: Any, **kwargs: Any) -> tuple[Any, Any, bool, Any]:
    """Returns what arguments of ``Module.to`` ask for: device, dtype, whether not to block, memory format."""
    found: tuple[Any, Any, bool, Any] = torch._C._nn._parse_to(*args, **kwargs)
    return found
