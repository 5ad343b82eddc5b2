"""What every kernel computes, in plain PyTorch: for tensors on the CPU.

All of it is computed in fp32 at least, and rounded at the end to the dtype of what comes in, as in kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(tensor: Tensor) -> Tensor:
    """In fp32, or fp64 if it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def activate(x: Tensor, activation: str) -> Tensor:
    """Act(x)."""
    if activation == "relu":
        return F.relu(x)
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def activate_backward(g: Tensor, x: Tensor, activation: str) -> Tensor:
    """``g act'(x)``."""
    found: Tensor
    if activation == "relu":
        found = torch.ops.aten.threshold_backward(g, x, 0)
    elif activation == "silu":
        found = torch.ops.aten.silu_backward(g, x)
    else:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        found = torch.ops.aten.gelu_backward(g, x, approximate=approximate)
    return found


def bias_activation(z: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """``act(z + bias)``."""
    x = wide(z) if bias is None else wide(z) + wide(bias)
    return activate(x, activation).to(z.dtype)


def bias_activation_backward(
    z: Tensor, bias: Tensor | None, g: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The activation, the gradient of z, and that of the bias."""
    x = wide(z) if bias is None else wide(z) + wide(bias)
    dz = activate_backward(wide(g), x, activation)
    dbias = None if bias is None else dz.reshape(-1, dz.shape[-1]).sum(0).to(bias.dtype)
    return activate(x, activation).to(z.dtype), dz.to(z.dtype), dbias
