"""Dispatch modes, function modes, autocast, transforms of `torch.func`, JIT traces and forward-mode AD.

Read in PyTorch 2.11.0 and 2.14.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch._C import _DisableAutocast as DisableAutocast
from torch._C import _DisableFuncTorch as DisableTransforms
from torch.autograd import forward_ad
from torch.utils import _device
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode

# The lengths of the stacks.
num_dispatch_modes = torch._C._len_torch_dispatch_stack
num_function_modes = torch._C._len_torch_function_stack
pop_function_mode = torch._C._pop_torch_function_stack
push_function_mode = torch._C._push_on_torch_function_stack


def dispatch_modes() -> list[Any]:
    """Returns the active dispatch modes, the innermost last."""
    return [torch._C._get_dispatch_stack_at(i) for i in range(num_dispatch_modes())]


def function_modes() -> list[Any]:
    """Returns the active function modes, the innermost last."""
    return [torch._C._get_function_stack_at(i) for i in range(num_function_modes())]


def is_of_a_tracer(mode: Any) -> bool:
    """Returns whether a dispatch mode is one of PyTorch's tracers."""
    return getattr(mode, "_mode_key", None) is not None


def default_device() -> torch.device | None:
    """Returns the default device that was set; None if none was."""
    device: torch.device | None = _device.CURRENT_DEVICE
    return device


# Return the innermost transform, and the state of a JIT trace; None if there is none.
innermost_transform = torch._C._functorch.peek_interpreter_stack
jit_trace = torch._C._get_tracing_state


def has_dual_level() -> bool:
    """Returns whether forward-mode AD is active."""
    return forward_ad._current_level >= 0
