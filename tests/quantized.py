"""Layers with frozen quantized weights and adapters: of bitsandbytes, of torchao, and of an own class."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HIDDEN = 32, 64
Make = Callable[[int, int, torch.dtype], nn.Module]


class Packed(nn.Parameter):
    """An int8 weight whose scale is in an attribute of an attribute, as bitsandbytes keeps it."""

    state: Any

    def __new__(cls, weight: Tensor) -> Packed:
        scale = weight.abs().amax(1, keepdim=True) / 127
        found = Tensor._make_subclass(cls, (weight / scale).round().to(torch.int8), False)
        found.state = SimpleNamespace(scale=scale, inner=SimpleNamespace(table=torch.ones(1)), bits=8)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        found = Tensor._make_subclass(Packed, self.data.clone(), False)
        found.state = copy.deepcopy(self.state)
        memo[id(self)] = found
        return found


class PackedLinear(nn.Module):
    weight: Packed

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = Packed(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        state = self.weight.state
        weight = self.weight.to(x.dtype) * (state.scale * state.inner.table * state.bits / 8).to(x.dtype)
        return F.linear(x, weight)


def packed(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Module:
    return PackedLinear(inputs, outputs)


class GroupedLinear(nn.Module):
    """A linear layer in the form that GPTQ and AWQ have: 4-bit numbers in int32 buffers, scales by groups."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor
    shifts: Tensor

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, group: int = 16) -> None:
        super().__init__()
        numbers, zeros = (torch.randint(16, (rows, outputs)) for rows in (inputs, inputs // group))
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        packed = numbers.unflatten(0, (-1, 8)) << shifts[:, None]
        self.register_buffer("qweight", packed.sum(1).to(torch.int32))
        self.register_buffer("qzeros", (zeros.unflatten(1, (-1, 8)) << shifts).sum(-1).to(torch.int32))
        self.register_buffer("scales", torch.rand(inputs // group, outputs).to(dtype) / (8 * inputs**0.5))
        self.register_buffer("g_idx", torch.arange(inputs, dtype=torch.int32) // group)
        self.register_buffer("shifts", shifts, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        numbers = ((self.qweight[:, None] >> self.shifts[:, None]) & 15).flatten(0, 1)
        zeros = ((self.qzeros[..., None] >> self.shifts) & 15).flatten(1)
        groups = self.g_idx.long()
        return x @ (self.scales[groups] * (numbers - zeros[groups])).to(x.dtype)


def four_bits(**settings: Any) -> Make:
    def make(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Module:
        nn_of = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").nn
        own = {"bias": False, "compute_dtype": dtype, "quant_type": "nf4", **settings}
        layer: nn.Module = nn_of.Linear4bit(inputs, outputs, **own)
        if own["bias"]:
            layer.bias.data = layer.bias.data.to(dtype)  # else, the first forward would do so
        return layer.to("cpu").requires_grad_(False)

    return make


def eight_bits(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Module:
    nn_of = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").nn
    layer: nn.Module = nn_of.Linear8bitLt(inputs, outputs, bias=False, has_fp16_weights=False)
    return layer.to("cpu")


def torchao(config: str, **settings: Any) -> Make:
    def make(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Module:
        pytest.importorskip("torchao", reason="torchao is not installed")
        package = importlib.import_module("torchao.quantization")
        layer = nn.Linear(inputs, outputs, bias=False, dtype=dtype).requires_grad_(False)
        package.quantize_(layer, getattr(package, config)(**settings))
        return layer

    return make


# All run as programs.
KINDS: dict[str, Make] = {
    "own": packed,
    "NF4": four_bits(),
    "NF4 without double quantization": four_bits(compress_statistics=False),
    "NF4 stored as bfloat16": four_bits(quant_storage=torch.bfloat16),
    "NF4 with a bias": four_bits(bias=True),
    "FP4": four_bits(quant_type="fp4"),
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao int8 activations": torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao int4": torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "torchao float8": torchao("Float8WeightOnlyConfig"),
}


class Adapted(nn.Module):
    """A frozen layer with LoRA."""

    def __init__(
        self, base: nn.Module, inputs: int, outputs: int, dropout: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(dropout)
        self.a = nn.Linear(inputs, 4, bias=False, dtype=dtype)
        self.b = nn.Linear(4, outputs, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return out + self.b(self.a(self.dropout(x)))


class Block(nn.Module):
    """A gated block of a transformer, without attention."""

    def __init__(self, make: Make, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype).requires_grad_(False)
        self.gate, self.up = (
            Adapted(make(WIDTH, HIDDEN, dtype), WIDTH, HIDDEN, dropout, dtype) for _ in range(2)
        )
        self.down = Adapted(make(HIDDEN, WIDTH, dtype), HIDDEN, WIDTH, dropout, dtype)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        out: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + out


def blocks(
    make: Make, number: int = 4, dropout: float = 0.0, dtype: torch.dtype = torch.float32
) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(make, dropout, dtype) for _ in range(number)))
