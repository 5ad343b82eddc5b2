"""Benchmark cases and tunings of gated activations, with gate and up separate and packed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import liger
from bench.case import KernelCase, ShapeClass, Tuning
from bench.families import keyed
from gpipe_fast.kernels import gated_activation_backward
from gpipe_fast.kernels.gated import CONFIGS, launch_backward
from gpipe_fast.kernels.launch import Config

COLS = 4096
BLOCK_ELEMENTS = (512, 1024, 2048, 4096)


def pair_inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns gate and up. ``elements`` counts the output."""
    shape = (max(1, elements // COLS), COLS)
    return [torch.randn(shape, dtype=dtype, device=device) for _ in range(2)]


def packed_inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns gate and up packed in one tensor."""
    return [torch.randn(max(1, elements // COLS), 2 * COLS, dtype=dtype, device=device)]


def _packed(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, -1)
    return F.silu(gate) * up


PAIR = KernelCase(
    "gated_activation silu",
    pair_inputs,
    differentiated=(0, 1),
    baseline=lambda gate, up: F.silu(gate) * up,
    ours=partial(gated_activation_backward, activation="silu"),
    launched=partial(launch_backward, activation="silu", with_a=True),
    liger=liger.swiglu,
)
GELU_PAIR = KernelCase(
    "gated_activation gelu_tanh",
    pair_inputs,
    differentiated=(0, 1),
    baseline=lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    ours=partial(gated_activation_backward, activation="gelu_tanh"),
    launched=partial(launch_backward, activation="gelu_tanh", with_a=True),
    liger=liger.geglu_tanh,
)
PACKED = KernelCase(
    "gated_activation silu, packed",
    packed_inputs,
    differentiated=(0,),
    baseline=_packed,
    ours=lambda z, g: gated_activation_backward(z, None, g, "silu")[:2],
    launched=lambda z, g: launch_backward(z, None, g, "silu", True),
)


def keyed_inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns gate, up, and the dropout key."""
    return [*pair_inputs(elements, dtype, device), keyed.make_key(device)]


DROPOUT = KernelCase(
    "gated_activation silu with dropout",
    keyed_inputs,
    differentiated=(0, 1),
    baseline=lambda gate, up, key: keyed.baseline(F.silu(gate) * up),
    ours=lambda gate, up, key, g: gated_activation_backward(gate, up, g, "silu", keyed.draw(key)),
    launched=lambda gate, up, key, g: launch_backward(gate, up, g, "silu", True, keyed.draw(key)),
    exact=lambda gate, up, key: keyed.exact(F.silu(gate) * up, key),
)


def _shape(inputs: Callable[[torch.dtype, str], list[Tensor]]) -> ShapeClass:
    blocks = [
        {"ROWS": elements // width, "COLS": width}
        for elements, width in product(BLOCK_ELEMENTS, (128, 256, 512, 1024))
        if width <= elements
    ]
    return ShapeClass(
        inputs,
        [Config(sizes, num_warps=warps) for sizes, warps in product(blocks, (4, 8))],
    )


CASES = [PAIR, GELU_PAIR, PACKED, DROPOUT]
TUNINGS = [
    Tuning(
        "gated_activation",
        PAIR,
        {f"cols<={widest}": _shape(partial(pair_inputs, 1 << 24)) for widest in CONFIGS},
    ),
    Tuning("gated_activation_dropout", DROPOUT, {"cols": _shape(partial(keyed_inputs, 1 << 24))}),
]
