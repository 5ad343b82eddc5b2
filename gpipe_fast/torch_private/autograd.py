"""Autograd's engine, the hooks on saved tensors, and version counters.

Read in PyTorch 2.11.0 and 2.14.1.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version_counter

# Returns the innermost pair of hooks on saved tensors, or None; given True, also during a trace.
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
pop_saved_tensors_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
push_saved_tensors_hooks = torch._C._autograd._push_saved_tensors_default_hooks
# Returns whether the graph of the running backward is retained for another one.
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
is_multithreading_enabled = torch._C._is_multithreading_enabled


def engine() -> Any:
    """Returns the object whose ``run_backward`` `torch.autograd.grad` calls."""
    variable: Any = torch.autograd.Variable
    return variable._execution_engine


def engine_replaced(new: Any) -> contextlib.AbstractContextManager[Any]:
    """Replaces autograd's engine for calls from Python in a block."""
    return mock.patch.object(torch.autograd.Variable, "_execution_engine", new)
