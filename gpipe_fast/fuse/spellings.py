"""Activations as models spell them, with the name under which the kernels know them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Spelling:
    """One way to spell an activation.

    Attributes:
        activation: its name in kernels/activations.py.
        function: takes the input, and the dtype in which powers are computed: under autocast fp32.
        forward: an operator of the activation.
        backward: an operator of its gradient.
        is_operator: whether the activation is one operator.
        has_power: whether it computes a power.
    """

    activation: str
    function: Callable[[Tensor, torch.dtype], Tensor]
    forward: Any
    backward: Any
    is_operator: bool = True
    has_power: bool = False


def _new_gelu(x: Tensor, dtype: torch.dtype) -> Tensor:
    """GELU with tanh as GPT-2 has it, and transformers' NewGELUActivation.

    The order in which the operators are called is the order in which autograd adds their gradients.
    """
    scale = math.sqrt(2.0 / math.pi)
    return 0.5 * x * (1.0 + torch.tanh(scale * (x + 0.044715 * torch.pow(x.to(dtype), 3.0))))


GELU = Spelling("gelu", lambda x, _: F.gelu(x), aten.gelu.default, aten.gelu_backward.default)
GELU_TANH = Spelling(
    "gelu_tanh", lambda x, _: F.gelu(x, approximate="tanh"), aten.gelu.default, aten.gelu_backward.default
)
NEW_GELU = Spelling(
    "gelu_tanh", _new_gelu, aten.tanh.default, aten.tanh_backward.default, is_operator=False, has_power=True
)
QUICK_GELU = Spelling(
    "quick_gelu", lambda x, _: x * torch.sigmoid(1.702 * x), aten.sigmoid.default,
    aten.sigmoid_backward.default, is_operator=False,
)  # fmt: skip
SILU = Spelling("silu", lambda x, _: F.silu(x), aten.silu.default, aten.silu_backward.default)
SPELLED_SILU = Spelling(
    "silu", lambda x, _: x * torch.sigmoid(x), aten.sigmoid.default, aten.sigmoid_backward.default,
    is_operator=False,
)  # fmt: skip
RELU = Spelling("relu", lambda x, _: F.relu(x), aten.relu.default, aten.threshold_backward.default)

SPELLINGS = (GELU, GELU_TANH, NEW_GELU, QUICK_GELU, SILU, SPELLED_SILU, RELU)


def with_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], g: Tensor
) -> tuple[Tensor, ...]:
    """Returns a function's result and the gradients of its inputs, as autograd computes them.

    Args:
        function: takes the inputs.
        inputs: the inputs.
        g: the gradient of the result.
    """
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in inputs]
        result = function(*leaves)
        return result.detach(), *torch.autograd.grad(result, leaves, g)
