"""Fuses small stages, and prints what was replaced; run by tests/unit/fuse with the fake runtime preloaded.

`replaced_cases.py OPERATORS PRECISION...`: prints a JSON object: by stage and precision, the names of all
replacements in the forward and in the backward, which recomputes, and the operators that are left.
"""

from __future__ import annotations

import itertools
import json
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload

from bench.models import llama
from gpipe_fast.fuse.fuse import fuse
from gpipe_fast.lower.alias import is_view_op
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE
from gpipe_fast.lower.split import StageGraph, split
from tools.stages import PRECISIONS, Size, Stage, trace_stage


class Residual(nn.Module):
    """Adds a linear layer of the norm of x to x."""

    def __init__(self, width: int, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.linear(self.norm(x))
        return added


class HeadNorm(nn.Module):
    """Normalizes each head of a product."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width, bias=False), nn.RMSNorm(width // heads)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x).unflatten(-1, (-1, self.norm.normalized_shape[0]))
        return x + torch.sin(self.norm(heads)).flatten(-2)


class Attention(nn.Module):
    """Attention with rotary positions; queries and keys have as many heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.linears, self.heads = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in "qkv"), heads

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, cos, sin = inputs
        query, key, value = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in self.linears)
        query, key = llama.rotate(query, key, cos, sin)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).flatten(2), cos, sin


def _hidden(size: Size, dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty(size.batch, size.length, size.width, dtype=dtype, requires_grad=True)]


def _hidden_and_tables(size: Size, dtype: torch.dtype) -> list[Tensor]:
    table = torch.empty(size.batch, size.length, size.width // size.heads, dtype=dtype)
    return [*_hidden(size, dtype), table, torch.empty_like(table)]


def _frozen(size: Size) -> list[nn.Module]:
    norms = [llama.RMSNorm(size.width).requires_grad_(False) for _ in range(2)]
    return [Residual(size.width, norm) for norm in norms]


STAGES = {
    "torch": Stage(
        lambda s: [*(Residual(s.width, nn.RMSNorm(s.width)) for _ in range(2)), nn.RMSNorm(s.width, 1e-6)],
        _hidden,
    ),
    "heads": Stage(lambda s: [HeadNorm(s.width, s.heads)], _hidden),
    "transformers": Stage(
        lambda s: [*(Residual(s.width, llama.RMSNorm(s.width)) for _ in range(2)), llama.RMSNorm(s.width)],
        _hidden,
    ),
    "frozen": Stage(_frozen, _hidden),
    "projection": Stage(lambda s: [llama.RMSNorm(s.width), nn.Linear(s.width, s.width, bias=False)], _hidden),
    "rotary": Stage(lambda s: [Attention(s.width, s.heads) for _ in range(2)], _hidden_and_tables),
}
SIZE = Size(batch=2, length=64, width=64, heads=4, vocab=1)


def replaced(graph: StageGraph) -> tuple[list[str], list[str]]:
    """Returns the names of the replacements in a graph, and the operators that are left, without views."""
    fused = fuse(graph)
    calls = [n for n in fused.graph.module.graph.nodes if isinstance(n.target, OpOverload)]
    left = {n.target._schema.name.removeprefix("aten::") for n in calls if not is_view_op(n.target)}
    return sorted(r.name for r in fused.replaced), sorted(left)


def main() -> None:
    found = {}
    for stage, precision in itertools.product(STAGES, sys.argv[2:]):
        graphs = split(trace_stage(STAGES[stage], PRECISIONS[precision], SIZE), FULL_RECOMPUTE)
        assert graphs.backward is not None
        found[f"{stage}, {precision}"] = [replaced(graph) for graph in (graphs.forward, graphs.backward)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
