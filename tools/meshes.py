"""What each process of a mesh sends in a step of a Llama of 7B, along pp, tp and dp_replicate.

Counted, not measured. The stages of {BLOCKS} blocks of width {WIDTH} and {MLP}, in bfloat16 and without
embedding and head, are traced on the meta device in a group of which one process exists; the
collectives, boundary tensors and gradients of their graphs are added up. A mini-batch has {SAMPLES}
sequences of {LENGTH} tokens for all replicas together, each of them a micro-batch. Figures are MiB that
one process sends, in rings: an all-reduce by n processes sends 2 (n - 1) / n of its tensor, an
all-gather or a reduce-scatter (n - 1) / n of the whole one. tp: the collectives of a stage for a
micro-batch, with everything saved, and with everything recomputed. pp: a boundary tensor and its gradient for
a micro-batch. dp: the gradients of a stage for a mini-batch. step: all of these for a mini-batch, with
everything recomputed. weights: those of a process, as many bytes as its gradients.

Plans: in `plan`, that of transformers, queries, keys and values each sum the gradient of their input.
In `joined`, norms return DTensors, so that these gradients are summed together. In `sequence`, norms
and boundaries moreover have a part of each sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from bench.measure import Table, report
from bench.models.llama import Block
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE, NO_RECOMPUTE
from gpipe_fast.lower.split import split
from gpipe_fast.torch_private.collectives import one_of_many
from gpipe_fast.trace.collectives import starts
from gpipe_fast.trace.joint_graph import GraphRole, JointGraph
from gpipe_fast.trace.trace import trace

WIDTH, HEADS, MLP, BLOCKS, LENGTH, SAMPLES = 4096, 32, 11008, 32, 4096, 32
PLANS = ("plan", "joined", "sequence")
# The processes along pp, tp and dp_replicate, and the plan.
MESHES = (
    (1, 1, 8, ""),
    (8, 1, 1, ""),
    *((1, 8, 1, plan) for plan in PLANS),
    (4, 2, 1, "joined"),
    (2, 4, 1, "joined"),
    (4, 1, 2, ""),
    (2, 2, 2, "joined"),
)
# The processes along pp and fsdp.
SHARDED = ((1, 8), (2, 4), (4, 2), (8, 1))


class Sent(NamedTuple):
    """What a process sends for a stage, in bytes.

    Attributes:
        saved: by its collectives for a micro-batch, if everything is saved.
        recomputed: by these if everything is recomputed.
        boundary: a boundary tensor and its gradient, for a micro-batch.
        gradients: the gradients of its parameters.
        collectives: the number of collectives of each graph.
    """

    saved: float
    recomputed: float
    boundary: int
    gradients: int
    collectives: Mapping[str, int]


def nbytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel()) * int(value.element_size())


def sent_by(node: fx.Node, size: int) -> float:
    """Returns the bytes that a collective sends in a ring."""
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    (given,) = node.all_input_nodes
    share = (size - 1) / size
    if name == "all_reduce":
        return 2 * share * nbytes(given)
    assert name in ("all_gather_into_tensor", "reduce_scatter_tensor"), name
    return share * max(nbytes(given), nbytes(node))


def parallel(block: nn.Module, mesh: Any, plan: str) -> None:
    """Divides a block over a mesh."""
    rows, columns = ("o_proj", "down_proj"), ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    norms, is_sequence = ("norm_1", "norm_2"), plan == "sequence"
    between = Shard(1) if is_sequence else Replicate()
    parallelize_module(block, mesh, {name: ColwiseParallel() for name in columns})
    parallelize_module(block, mesh, {name: RowwiseParallel(output_layouts=between) for name in rows})
    if is_sequence:
        parallelize_module(block, mesh, {name: SequenceParallel() for name in norms})
    if plan != "plan":
        whole = PrepareModuleOutput(
            output_layouts=between, desired_output_layouts=Replicate(), use_local_output=False
        )
        parallelize_module(block, mesh, dict.fromkeys(norms, whole))


@cache
def sent(
    size: int,
    plan: str = "",
    blocks: int = BLOCKS,
    width: int = WIDTH,
    heads: int = HEADS,
    mlp: int = MLP,
    length: int = LENGTH,
) -> Sent:
    """Counts a stage that ``size`` processes have a part each of."""
    with one_of_many(size), torch.device("meta"):
        stage = [Block(width, heads, heads, mlp).bfloat16() for _ in range(blocks)]
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        for block in stage if size > 1 else ():
            parallel(block, mesh, plan)
        own = length // size if plan == "sequence" else length
        x = torch.empty(1, own, width, dtype=torch.bfloat16, requires_grad=True)
        positions = torch.empty(1, length, width // heads, dtype=torch.bfloat16)
        joint = trace(stage, [x, positions, positions])
        assert isinstance(joint, JointGraph), joint
        saving, recomputing = split(joint, NO_RECOMPUTE), split(joint, FULL_RECOMPUTE)
    graphs = {"forward": recomputing.forward, "backward": saving.backward}
    graphs["backward_recompute"] = recomputing.backward
    found = {
        name: [node for node in graph.module.graph.nodes if starts(node)]
        for name, graph in graphs.items()
        if graph is not None
    }
    sums = {name: sum(sent_by(node, size) for node in nodes) for name, nodes in found.items()}
    roles = GraphRole.OUTPUT, GraphRole.INPUT_GRADIENT, GraphRole.PARAMETER_GRADIENT
    output, gradient, gradients = (sum(map(nbytes, joint.of(role).values())) for role in roles)
    saved, recomputed = (sums["forward"] + sums[name] for name in ("backward", "backward_recompute"))
    return Sent(saved, recomputed, output + gradient, gradients, {name: len(found[name]) for name in found})


def row(pp: int, tp: int, dp: int, plan: str) -> list[object]:
    """Returns the row of a mesh."""
    stage = sent(tp, plan, BLOCKS // pp)
    boundary = stage.boundary if pp > 1 else 0
    summed = 2 * (dp - 1) / dp * stage.gradients
    step = SAMPLES // dp * (stage.recomputed + boundary) + summed
    mib = [f"{each / 2**20:.0f}" for each in (stage.saved, stage.recomputed, boundary, summed)]
    return [pp, tp, dp, plan, *mib, f"{step / 2**30:.2f}", f"{stage.gradients / 2**30:.2f}"]


def row_of_shards(pp: int, shards: int) -> list[object]:
    """Returns the row of a mesh with rows of parameters along 'fsdp'."""
    stage = sent(1, blocks=BLOCKS // pp)
    weights, share = stage.gradients, (shards - 1) / shards
    boundaries = SAMPLES // shards * (stage.boundary if pp > 1 else 0)
    once = boundaries + 2 * share * weights
    each = boundaries + SAMPLES // shards * 3 * share * weights
    held = 2 * weights
    freed = min(held, 2 * weights / shards + 2 * weights * pp / BLOCKS)
    return [pp, shards, *(f"{each / 2**30:.2f}" for each in (once, each, held, freed))]


def main() -> None:
    headers = "pp | tp | dp | plan | tp, saved | tp, recomputed | pp | dp | step, GiB | weights, GiB"
    note = (
        "GiB that a process sends in a step, and holds of weights and gradients: if it gathers those of its\n"
        "stage once, and sums their gradients once, as with `gpipe_fast.shard`; and if it gathered those of\n"
        "a block in the forward and the backward of each micro-batch, and summed their gradients there.\n"
    )
    names = "pp | fsdp | sent, once | sent, each micro-batch | held, once | held, each micro-batch"
    shards = Table("Sharded parameters", names, [row_of_shards(*mesh) for mesh in SHARDED], note)
    report(globals(), headers, [row(*mesh) for mesh in MESHES], [shards])
