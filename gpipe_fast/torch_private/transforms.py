"""What shows that a call is inside a transform of `torch.func`, a JIT trace, or forward-mode AD.

Read in PyTorch 2.11.0 and 2.14.1.
"""

from __future__ import annotations

import torch
from torch._C import _DisableFuncTorch as DisableTransforms
from torch.autograd import forward_ad

# Return the innermost transform, and the state of a JIT trace; None if there is none.
innermost_transform = torch._C._functorch.peek_interpreter_stack
jit_trace = torch._C._get_tracing_state


def has_dual_level() -> bool:
    """Returns whether forward-mode AD is active."""
    return forward_ad._current_level >= 0


__all__ = ["DisableTransforms", "has_dual_level", "innermost_transform", "jit_trace"]
