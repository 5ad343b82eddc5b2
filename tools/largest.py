"""The largest models that fit, with and without GPipe: the paper's table 1 by `GPipe.memory`.

Table 1 of the GPipe paper (arXiv 1811.06965) beside `GPipe.memory(device="cuda")` on meta tensors:
nothing runs. Mini-batches are those of the paper, 128 images of 224 x 224 or 32 x 1024 tokens; the
Transformer has blocks of width 2048 with 32 heads, and 32,000 tokens. A parameter takes 12 bytes, as in
the paper: itself and two moments of RMSProp in 32 bits; its gradient does not count, and everything
else is in bfloat16. Naive-1 is one micro-batch, and nothing is recomputed; the others have 32
micro-batches, and everything is recomputed. The paper's AmoebaNets in several stages are left out. Of
a Transformer, the first stage, the last one and one between are counted. The largest sizes are scaled: an
AmoebaNet's parameters with the square of its filters and the rest with them; a Transformer's stages lie
on straight lines through 2 and 4 blocks. The paper does not say how many micro-batches it had, which
dtype, or how its layers were cut, and it has the two figures of bytes of the Transformer's Naive-1 the
other way round.
XLA fuses operators, so that it keeps fewer activations than operators that run one by one: this makes
most of the difference where nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.measure import Table, report
from bench.models.amoebanet import amoebanet_d
from bench.models.gpt import gpt
from gpipe_fast import GPipe

GIB = 2**30
# "Each model parameter needs 12 bytes since we applied RMSProp during training."
PARAMETER_BYTES = 12
CHUNKS, DTYPE = 32, torch.bfloat16
_STEP = 16  # filters


class SumOfCrossEntropies(nn.Module):
    """The cross entropy of each sample or token, added up."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")


@dataclass(frozen=True)
class Need:
    """What a model needs.

    Attributes:
        parameters: the number of parameters of each stage.
        activations: the bytes that each stage needs beside parameters and gradients.
    """

    parameters: list[int]
    activations: list[int]

    @property
    def largest(self) -> int:
        """The bytes of the device that needs most."""
        return max(
            PARAMETER_BYTES * number + size
            for number, size in zip(self.parameters, self.activations, strict=True)
        )


def need(layers: nn.Sequential, balance: Sequence[int], sample: Tensor, target: Tensor, naive: bool) -> Need:
    """Returns what a step needs on GPUs that this machine need not have; nothing runs, or gets memory.

    Args:
        layers: layers on the meta device.
        balance: the number of layers of each stage.
        sample: a mini-batch.
        target: its target.
        naive: whether there is one micro-batch, and nothing is recomputed.
    """
    chunks, checkpoint = (1, "never") if naive else (CHUNKS, "always")
    devices = ["cpu"] * len(balance)
    model = GPipe(layers, list(balance), devices=devices, chunks=chunks, checkpoint=checkpoint)
    loss = SumOfCrossEntropies()
    found = model.memory(sample, target=target, loss_fn=loss, normalizer=1, device="cuda").stages
    activations = []
    for stage in found:
        assert stage is not None
        activations.append(stage.total - stage.parameters - stage.gradients)
    numbers = [sum(p.numel() for p in part.parameters()) for part in model.partitions]
    return Need(numbers, activations)


@dataclass(frozen=True)
class Row:
    """A column of the paper's table.

    Attributes:
        name: its name.
        num_stages: K.
        size: the size of the model in the table.
        parameters: the published number of parameters, in millions.
        parameter_gib: the published bytes for parameters on all devices, in GB.
        activation_gib: the same for activations.
    """

    name: str
    num_stages: int
    size: tuple[int, ...]
    parameters: float
    parameter_gib: float
    activation_gib: float

    @property
    def naive(self) -> bool:
        """Whether the model runs without GPipe."""
        return self.name == "Naive-1"


# Without the paper's models in 2, 4 and 8 stages, which take long to trace.
AMOEBANET = [
    Row("Naive-1", 1, (18, 208), 82, 1.05, 6.26),
    Row("Pipeline-1", 1, (18, 416), 318, 3.8, 3.46),
]
# The paper has the first row's bytes of parameters and of activations in the other order.
TRANSFORMER = [
    Row("Naive-1", 1, (3,), 282.2, 3.15, 11.7),
    Row("Pipeline-1", 1, (13,), 785.8, 8.8, 6.4),
    Row("Pipeline-8", 8, (103,), 5300, 59.5, 50.9),
    Row("Pipeline-32", 32, (415,), 21000, 235.1, 199.9),
    Row("Pipeline-128", 128, (1663,), 83900, 937.9, 796.1),
]


def amoebanet(row: Row, num_filters: int) -> Need:
    """Returns what an AmoebaNet-D in one stage needs for 128 images."""
    with torch.device("meta"):
        layers = amoebanet_d(row.size[0], num_filters).to(DTYPE)
        images, target = torch.empty(128, 3, 224, 224, dtype=DTYPE), torch.zeros(128, dtype=torch.long)
    return need(layers, [len(layers)], images, target, row.naive)


def largest_amoebanet(row: Row, limit: int) -> tuple[int, Need]:
    """Returns the most filters, in steps of 16, with which a model fits, and what it needs then.

    What it needs is scaled from what it needs at the published size.
    """
    published = row.size[1]
    found = amoebanet(row, published)

    def scaled(filters: int) -> Need:
        scale = filters / published
        numbers = [round(number * scale**2) for number in found.parameters]
        return Need(numbers, [round(size * scale) for size in found.activations])

    filters = _STEP
    while scaled(filters + _STEP).largest <= limit:
        filters += _STEP
    return filters, scaled(filters)


@cache
def blocks(balance: tuple[int, ...], naive: bool) -> Need:
    """Returns what a Transformer of blocks of width 2048 needs for 32 x 1024 tokens.

    Args:
        balance: the number of blocks of each stage; the first has the embedding, too, and the last the head.
        naive: as for `need`.
    """
    with torch.device("meta"):
        layers = gpt(sum(balance), 2048, 32, vocab=32000).to(DTYPE)
        tokens = torch.zeros(32, 1024, dtype=torch.long)
    sizes = list(balance)
    ends = len(layers) - sum(balance)  # the layers before the first block and after the last one
    sizes[0] += 1
    sizes[-1] += ends - 1
    return need(layers, sizes, tokens, tokens, naive)


def transformer(row: Row, num_blocks: int) -> Need:
    """Returns what a Transformer needs, whose first stages have one block more than the last ones.

    Of all stages between the first and the last one, one is counted.
    """
    size, more = divmod(num_blocks, row.num_stages)
    if row.num_stages == 1:
        return blocks((size,), row.naive)
    found = blocks((size + (more > 0), size + (more > 1), size), False)
    parameters, activations = (
        [first, *[between] * (row.num_stages - 2), last]
        for first, between, last in (found.parameters, found.activations)
    )
    return Need(parameters, activations)


def largest_transformer(row: Row, limit: int) -> tuple[int, Need]:
    """Returns the most blocks with which a model fits, and what it needs then.

    What a stage needs is on a straight line through what it needs with 2 and with 4 blocks.
    """
    kinds = min(row.num_stages, 3)
    two, four = (blocks((size,) * kinds, row.naive) for size in (2, 4))

    def line(kind: int, size: int) -> tuple[int, int]:
        """Returns the parameters and the bytes of activations of a stage with so many blocks."""
        pairs = (two.parameters, four.parameters), (two.activations, four.activations)
        first, second = (a[kind] + (b[kind] - a[kind]) * (size - 2) // 2 for a, b in pairs)
        return first, second

    def needed(kind: int, size: int) -> int:
        number, activations = line(kind, size)
        return PARAMETER_BYTES * number + activations

    best = []
    for kind in range(kinds):
        size = 1
        while needed(kind, size + 1) <= limit:
            size += 1
        best.append(size)
    counts = (1, row.num_stages - 2, 1) if kinds == 3 else (1,)
    stages = [line(kind, best[kind]) for kind, count in enumerate(counts) for _ in range(count)]
    total = sum(size * count for size, count in zip(best, counts, strict=True))
    return total, Need([number for number, _ in stages], [size for _, size in stages])


def rows(
    table: Sequence[Row],
    limit_gib: int,
    of: Callable[[Row, int], Need],
    largest: Callable[[Row, int], tuple[int, Need]],
) -> tuple[list[list[object]], list[list[object]]]:
    """Returns the rows of two tables: what the published sizes need, and which sizes fit."""
    needs: list[list[object]] = []
    fitting: list[list[object]] = []
    for row in table:
        found = of(row, row.size[-1])
        number, size = sum(found.parameters), sum(found.activations)
        parameters = row.parameters, number / 1e6, row.parameter_gib, PARAMETER_BYTES * number / GIB
        sizes = row.activation_gib, size / GIB, found.largest / GIB
        needs.append([row.name, ", ".join(map(str, row.size)), *parameters, *sizes])
        most, found = largest(row, limit_gib * GIB)
        size_of = ", ".join(map(str, (*row.size[:-1], most)))
        fitting.append([row.name, size_of, sum(found.parameters) / 1e6, found.largest / GIB])
    return needs, fitting


NEEDS = (
    " | size | published parameters, M | counted, M | published, for parameters, GB |"
    " 12 bytes each, GiB | published, for activations, GB | predicted, GiB | "
    "predicted, largest device, GiB"
)
FITTING = ["", "largest size", "parameters, M", "largest device, GiB"]


def main() -> None:
    amoebanets = rows(AMOEBANET, 8, amoebanet, largest_amoebanet)
    transformers = rows(TRANSFORMER, 16, transformer, largest_transformer)
    report(
        globals(),
        NEEDS,
        amoebanets[0],
        [
            Table("AmoebaNet-D: the largest that fit into 8 GiB each", FITTING, amoebanets[1], ""),
            Table("Transformer", NEEDS, transformers[0], ""),
            Table("Transformer: the largest that fit into 16 GiB each", FITTING, transformers[1], ""),
        ],
    )
