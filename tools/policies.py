"""Counts what a block saves and recomputes under each checkpoint policy; needs no GPU.

Counted, not measured, for one block and one micro-batch of {SIZE.batch} sequences of {SIZE.length}
positions, width {SIZE.width}, {SIZE.heads} heads, bfloat16. The graphs are those of a GPU of compute
capability 9.0, whose attention is cuDNN's. Operations are those of the recomputed products and attention
(`torch.utils.flop_counter`); saved bytes leave out the block's input.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench.measure import report
from gpipe_fast.lower.checkpoint import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    SAVE_ATTENTION,
    SavedFraction,
)
from gpipe_fast.lower.ladder import bytes_of, is_backward
from gpipe_fast.lower.operator_times import operations
from gpipe_fast.lower.split import split
from gpipe_fast.lower.work import is_attention
from gpipe_fast.trace.joint_graph import GraphRole, JointGraph
from tools.stages import LARGE, PRECISIONS, STAGES, trace_stage

HEADERS = (
    "block",
    "checkpoint",
    "MB saved",
    "GFLOP again: products",
    "attention",
    "of a forward and backward",
)
SIZE = replace(LARGE, batch=8, length=1024)
POLICIES: dict[str, SavedFraction] = {
    "'always'": FULL_RECOMPUTE,
    "'except_attention'": SAVE_ATTENTION,
    "0.06": 0.06,
    "0.5": 0.5,
    "'never'": NO_RECOMPUTE,
}


def rows_of(name: str, joint: JointGraph) -> Iterator[list[object]]:
    """Yields a row of the table for each policy of a block."""
    total = sum(map(operations, joint.module.graph.nodes))
    for policy, saved_fraction in POLICIES.items():
        parts = split(joint, saved_fraction)
        assert parts.backward is not None
        again = [
            n for n in parts.backward.module.graph.nodes if n.op == "call_function" and not is_backward(n)
        ]
        attention = sum(operations(n) for n in again if is_attention(n))
        products = sum(map(operations, again)) - attention
        saved = sum(
            bytes_of(n.node.meta["val"]) for n in parts.forward.outputs if n.port.role is GraphRole.SAVED
        )
        gigaflops = (f"{each / 1e9:.1f}" for each in (products, attention))
        yield [name, policy, f"{saved / 1e6:.1f}", *gigaflops, f"{(products + attention) / total:.1%}"]


def rows() -> list[list[object]]:
    """Returns the rows of all blocks; runs with the fake CUDA runtime."""
    stages = {name: trace_stage(STAGES[name], PRECISIONS["bf16"], SIZE) for name in ("GPT", "Llama")}
    return [row for name, joint in stages.items() for row in rows_of(name, joint)]


def main(arguments: Sequence[str] = ()) -> None:
    argparse.ArgumentParser(prog="python -m tools policies", description=__doc__).parse_args(arguments)
    from tools import fake_cuda

    if (libraries := fake_cuda.libraries("policies")) is not None:
        report(globals(), HEADERS, fake_cuda.call(libraries[0], "tools.policies:rows"))
