"""Random training runs: `draw` maps a seed to a `Combination`, plain data with a repr."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.layers.skip import Namespace
from tests.contracts.contract_1_same_bits.layer_menu import (
    INPUTS,
    LOWERED,
    MENU,
    OUTPUTS,
    RUN_IN_PYTHON,
    Layers,
    PopAndAdd,
    StashSine,
)

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
BACKENDS = ("auto", "eager", "aten")
HOOKS = ("forward", "forward pre", "full backward", "parameter")
OPTIMIZERS = ("SGD", "AdamW")
AUTOCAST = ("off", "bfloat16")
LAYOUTS = ("contiguous", "permuted", "gaps", "unaligned")
LOSSES = ("noise", "squares", "first", "mean", "transposed")
# What changes in one of the steps.
CHANGES = ("nothing", "batch", "length", "checkpoint", "chunks", "eval", "freeze")


@dataclass(frozen=True)
class Combination:
    """One training run; every string is a key of a table in this file or in layer_menu.py."""

    seed: int
    inputs: str
    layers: tuple[str, ...]
    skips: tuple[tuple[int, int], ...]  # (stash, pop): indices of the layers before which they are inserted
    outputs: str
    balance: tuple[int, ...]
    batch: int
    length: int
    chunks: int
    checkpoint: str
    backend: str
    dtype: str
    autocast: str
    layout: str
    input_gradient: bool
    frozen: float
    hooks: tuple[str, ...]
    training: bool
    grad: bool
    optimizer: str
    loss: str
    accumulate: bool
    steps: int
    change: str
    change_at: int

    @property
    def in_python(self) -> bool:
        """Whether any layer runs in Python because it cannot be lowered."""
        return any(name in RUN_IN_PYTHON for name in self.layers)

    def build(self) -> Layers:
        """Returns new layers, with the same parameters at every call."""
        torch.manual_seed(self.seed)
        skip_layers: list[Layers] = [[] for _ in range(len(self.layers) + 1)]
        for first, last in self.skips:
            namespace = Namespace()
            skip_layers[first].append(StashSine().isolate(namespace))
            skip_layers[last].append(PopAndAdd().isolate(namespace))
        merged = itertools.zip_longest(skip_layers, (MENU[name]() for name in self.layers), fillvalue=[])
        layers = [
            *INPUTS[self.inputs].layers(),
            *(layer for skips, entry in merged for layer in (*skips, *entry)),
            *OUTPUTS[self.outputs](),
        ]
        frozen_choices = random.Random(self.seed)
        for layer in layers:
            for parameter in layer.to(DTYPES[self.dtype]).parameters():
                parameter.requires_grad_(frozen_choices.random() >= self.frozen)
        return layers


def draw(seed: int) -> Combination:
    """Returns the combination of this seed."""
    r = random.Random(seed)
    inputs = r.choice([*INPUTS, "tensor", "tokens"])
    outputs = r.choice([*OUTPUTS, "tensor", "tensor"])
    layers, num_layers = _draw_layers(r, len(INPUTS[inputs].layers()) + len(OUTPUTS[outputs]()))
    skips = _draw_skips(random.Random(f"skips of {seed}"), len(layers))
    in_python = any(name in RUN_IN_PYTHON for name in layers)
    backend = r.choice(["auto", "auto", "eager"] if in_python else ["auto", "auto", "aten", "eager"])
    # If all stages are lowered, gradients must have the layout of the outputs.
    losses = LOSSES if backend == "eager" or in_python else LOSSES[:3]
    steps = r.randint(3, 4) if in_python else r.randint(2, 3)
    return Combination(
        seed,
        inputs,
        layers,
        skips,
        outputs,
        balance=_draw_balance(r, num_layers + 2 * len(skips)),
        batch=r.randint(1, 13),
        length=r.randint(2, 5),  # batch norm needs at least two values per channel
        chunks=r.randint(1, 9),
        checkpoint=r.choice(CHECKPOINT_MODES),
        backend=backend,
        # PyTorch has no kernel that adds sparse bfloat16 tensors.
        dtype=r.choice(["float32", "float64"] if "sparse" in layers else ["float32", "float32", *DTYPES]),
        autocast=r.choice(["off", "off", *AUTOCAST]),
        layout=r.choice(["contiguous", "contiguous", *LAYOUTS]),
        input_gradient=r.random() < 0.5,
        frozen=r.choice([0.0, 0.0, 0.3, 0.8]),
        hooks=tuple(hook for hook in HOOKS if r.random() < 0.15),
        training=r.random() < 0.8,
        grad=r.random() < 0.9,
        optimizer="SGD" if "sparse" in layers else r.choice(OPTIMIZERS),
        loss=r.choice(losses),
        accumulate=r.random() < 0.2,
        steps=steps,
        change=r.choice(["nothing", *CHANGES]),
        change_at=r.randrange(1, steps),
    )


def _draw_layers(r: random.Random, num_other_layers: int) -> tuple[tuple[str, ...], int]:
    """Returns layer names and the total number of layers, three to nine; at most two run in Python."""
    num_wanted, names = r.randint(3, 9) - num_other_layers, list[str]()
    python = [r.choice([*RUN_IN_PYTHON]) for _ in range(r.choice([0, 0, 1, 2]))]
    remaining = num_wanted - sum(len(RUN_IN_PYTHON[name]()) for name in python)
    while remaining > 0:
        name = r.choice([*LOWERED])
        if (size := len(LOWERED[name]())) <= remaining:
            names.append(name)
            remaining -= size
    for name in python:
        names.insert(r.randint(0, len(names)), name)
    return tuple(names), num_other_layers + sum(len(MENU[name]()) for name in names)


def _draw_skips(r: random.Random, num_entries: int) -> tuple[tuple[int, int], ...]:
    """Returns no skip connections for half of the combinations, else one to three."""
    if r.random() < 0.5 or not num_entries:
        return ()
    gaps = range(num_entries + 1)
    return tuple((min(pair), max(pair)) for pair in (r.sample(gaps, 2) for _ in range(r.randint(1, 3))))


def _draw_balance(r: random.Random, num_layers: int) -> tuple[int, ...]:
    num_stages = r.randint(1, min(4, num_layers))
    ends = [0, *sorted(r.sample(range(1, num_layers), num_stages - 1)), num_layers]
    return tuple(end - begin for begin, end in itertools.pairwise(ends))


def make_tensor(combination: Combination, generator: torch.Generator, *size: int) -> Tensor:
    """Returns a mini-batch of noise in the combination's dtype and layout."""
    dtype = DTYPES[combination.dtype]

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    batch, length, width = size
    if combination.layout == "permuted":
        return noise(batch, width, length).transpose(1, 2)
    if combination.layout == "gaps":
        return noise(batch, length + 2, width)[:, 1:-1]
    if combination.layout == "unaligned":
        return noise(batch * length * width + 1)[1:].view(batch, length, width)
    return noise(batch, length, width)
