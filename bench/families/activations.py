"""Bias and activation."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.case import Case, Shape, Tuning
from gpipe_fast.kernels import bias_activation_backward
from gpipe_fast.kernels.activations import ACTIVATIONS, CONFIGS, launch_backward
from gpipe_fast.kernels.launch import Config

COLS = 4096
# Of elements in one block: enough loads in flight, and not more than registers hold.
BLOCK_ELEMENTS = (1024, 2048, 4096, 8192)

PLAIN = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def inputs(elements: int, dtype: torch.dtype, device: str, cols: int = COLS) -> list[Tensor]:
    """The product and the bias."""
    z = torch.randn(max(1, elements // cols), cols, dtype=dtype, device=device)
    return [z, torch.randn(cols, dtype=dtype, device=device)]


def _case(activation: str) -> Case:
    return Case(
        f"bias_activation {activation}",
        inputs,
        differentiated=(0, 1),
        plain=lambda z, bias: PLAIN[activation](z + bias),
        ours=partial(bias_activation_backward, activation=activation),
        launched=partial(launch_backward, activation=activation),
    )


def _shape(widest: int) -> Shape:
    cols = min(widest, COLS)
    blocks = [
        {"ROWS": elements // width, "COLS": width}
        for elements, width in product(BLOCK_ELEMENTS, (64, 128, 256, 512, 1024))
        if width <= cols
    ]
    return Shape(
        partial(inputs, 1 << 24, cols=cols),
        [Config(sizes, num_warps=warps) for sizes, warps in product(blocks, (4, 8))],
    )


CASES = [_case(activation) for activation in ACTIVATIONS]
TUNINGS = [
    Tuning("bias_activation", _case("gelu"), {f"cols<={widest}": _shape(widest) for widest in CONFIGS})
]
