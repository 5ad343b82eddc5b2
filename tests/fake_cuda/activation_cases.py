"""Fuses small stages, and prints what was replaced; run by tests/unit/fuse with the fake runtime preloaded.

`activation_cases.py OPERATORS PRECISION...`: prints a JSON object: by stage and precision, the names of all
replacements in the forward and in the backward, which recomputes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast.fuse.fuse import fuse
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE
from gpipe_fast.lower.split import split
from tools.stages import PRECISIONS, SMALL, Size, Stage, trace_stage

WIDTH = 32


class Function(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Attention(nn.Module):
    """Attention whose queries, keys and values are taken from one product."""

    def __init__(self, take: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.linear, self.take = nn.Linear(WIDTH, 3 * WIDTH), take

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.take(self.linear(x))
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def by_index(packed: Tensor) -> tuple[Tensor, ...]:
    found = packed.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
    return found[0], found[1], found[2]


def by_index_in_heads(packed: Tensor) -> tuple[Tensor, ...]:
    found = packed.unflatten(-1, (4, 3, -1))
    return tuple(found[..., i, :].transpose(1, 2) for i in range(3))


def by_unbind(packed: Tensor) -> tuple[Tensor, ...]:
    return packed.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def _hidden(rank: int) -> Callable[..., list[Tensor]]:
    shape = (2, 16, WIDTH) if rank == 3 else (32, WIDTH) if rank == 2 else (2, WIDTH, 8, 8)
    return lambda size, dtype: [torch.empty(shape, dtype=dtype, requires_grad=True)]


def _between(function: Callable[[Tensor], Tensor], wide: int = 2, rank: int = 3) -> Stage:
    """A function between two linear layers; the first is ``wide`` times as wide as the second's input."""

    def layers(size: Size) -> list[nn.Module]:
        return [nn.Linear(WIDTH, 2 * WIDTH), Function(function), nn.Linear(2 * WIDTH // wide, WIDTH)]

    return Stage(layers, _hidden(rank))


STAGES = {
    "gelu": _between(F.gelu, 1),
    "gelu, last": Stage(lambda s: [nn.Linear(WIDTH, WIDTH), nn.GELU()], _hidden(3)),
    "relu of rows": _between(F.relu, 1, rank=2),
    "relu, dropout": _between(lambda x: F.dropout(F.relu(x), 0.1), 1),
    "silu, dropout of rows": _between(lambda x: F.dropout(F.silu(x), 0.1), 1, rank=2),
    "relu of images": Stage(lambda s: [nn.Conv2d(WIDTH, WIDTH, 1), nn.ReLU()], _hidden(4)),
    "new gelu": _between(new_gelu, 1),
    "new gelu of rows": _between(lambda x: new_gelu(x).view(-1, 2 * WIDTH), 1),
    "quick gelu": _between(lambda x: x * torch.sigmoid(1.702 * x), 1),
    "chunks": _between(lambda x: (lambda gate, up: F.silu(gate) * up)(*x.chunk(2, 2))),
    "chunks, up first": _between(lambda x: (lambda up, gate: up * F.gelu(gate))(*x.chunk(2, dim=-1))),
    "slices": _between(lambda x: x[..., WIDTH:] * F.silu(x[..., :WIDTH])),
    "chunks of rows": _between(lambda x: (lambda gate, up: F.relu(gate) * up)(*x.chunk(2, -1)), rank=2),
    "unbind": Stage(lambda s: [Attention(by_unbind)], _hidden(3)),
    "indices": Stage(lambda s: [Attention(by_index)], _hidden(3)),
    "indices in heads": Stage(lambda s: [Attention(by_index_in_heads)], _hidden(3)),
}


def main() -> None:
    found = {}
    for precision in sys.argv[2:]:
        for name, stage in STAGES.items():
            graphs = split(trace_stage(stage, PRECISIONS[precision], SMALL), FULL_RECOMPUTE)
            replaced = [[r.name for r in fuse(g).replaced] for g in (graphs.forward, graphs.backward)]
            found[f"{name}, {precision}"] = replaced
    print(json.dumps(found))


if __name__ == "__main__":
    main()
