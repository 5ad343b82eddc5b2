"""Benchmark cases and tunings of bias and activation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.case import KernelCase, ShapeClass, Tuning
from bench.families import keyed
from gpipe_fast.kernels import bias_activation_backward
from gpipe_fast.kernels.activations import CONFIGS, launch_backward
from gpipe_fast.kernels.launch import Config

COLS = 4096
# Elements per block: enough loads in flight, and no more elements than fit into registers.
BLOCK_ELEMENTS = (1024, 2048, 4096, 8192)

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def inputs(elements: int, dtype: torch.dtype, device: str, cols: int = COLS) -> list[Tensor]:
    """Returns the product and the bias."""
    z = torch.randn(max(1, elements // cols), cols, dtype=dtype, device=device)
    return [z, torch.randn(cols, dtype=dtype, device=device)]


def _case(activation: str) -> KernelCase:
    return KernelCase(
        f"bias_activation {activation}",
        inputs,
        differentiated=(0, 1),
        baseline=lambda z, bias: PLAIN[activation](z + bias),
        ours=partial(bias_activation_backward, activation=activation),
        launched=partial(launch_backward, activation=activation, with_a=True),
    )


def keyed_inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns the product, the bias, and the dropout key."""
    return [*inputs(elements, dtype, device), keyed.make_key(device)]


DROPOUT = KernelCase(
    "bias_activation gelu with dropout",
    keyed_inputs,
    differentiated=(0, 1),
    baseline=lambda z, bias, key: keyed.baseline(F.gelu(z + bias)),
    ours=lambda z, bias, key, g: bias_activation_backward(z, bias, g, "gelu", keyed.draw(key)),
    launched=lambda z, bias, key, g: launch_backward(z, bias, g, "gelu", True, keyed.draw(key)),
    exact=lambda z, bias, key: keyed.exact(F.gelu(z + bias), key),
)


def _shape(cols: int, inputs: Callable[[torch.dtype, str], list[Tensor]]) -> ShapeClass:
    blocks = [
        {"ROWS": elements // width, "COLS": width}
        for elements, width in product(BLOCK_ELEMENTS, (64, 128, 256, 512, 1024))
        if width <= cols
    ]
    return ShapeClass(
        inputs,
        [Config(sizes, num_warps=warps) for sizes, warps in product(blocks, (4, 8))],
    )


def _shapes() -> dict[str, ShapeClass]:
    widths = {widest: min(widest, COLS) for widest in CONFIGS}
    return {
        f"cols<={widest}": _shape(cols, partial(inputs, 1 << 24, cols=cols))
        for widest, cols in widths.items()
    }


CASES = [*(_case(activation) for activation in PLAIN), DROPOUT]
TUNINGS = [
    Tuning("bias_activation", _case("gelu"), _shapes()),
    Tuning("bias_activation_dropout", DROPOUT, {"cols": _shape(COLS, partial(keyed_inputs, 1 << 24))}),
]
