"""The time to trace, split and lower a stage, and the time for several equal stages.

Full recompute. The lower rows compile a pipeline of 24 blocks and build its programs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bench.measure import report
from bench.models.gpt import blocks
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.split import split
from gpipe_fast.runtime.compile import CompilationFailure, Compiler
from gpipe_fast.runtime.stage import BoundarySpec, Stage, TensorSpec
from gpipe_fast.trace.layer_states import LayerStates
from gpipe_fast.trace.trace import trace
from gpipe_fast.trace.traceability import Untraceable

CPU = torch.device("cpu")


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def one_stage(count: int) -> list[object]:
    """Returns a row: seconds to trace and to lower one stage of `count` blocks."""
    layers, input = blocks(count), torch.randn(2, 128, 256, requires_grad=True)
    start = time.perf_counter()
    joint = trace(layers, [input])
    traced = time.perf_counter()
    assert not isinstance(joint, Untraceable), joint
    parts = split(joint, FULL_RECOMPUTE)
    assert parts.backward is not None
    programs = [lower(parts.forward), lower(parts.backward)]
    lowered = time.perf_counter()
    steps = sum(len(p.steps) for p in programs)
    return [f"1 stage of {count}", 1, traced - start, lowered - traced, steps]


def equal_stages(count: int, num_stages: int) -> list[object]:
    """Returns a row for a pipeline of equal stages, of which only the first is traced and lowered."""
    per_stage = count // num_stages
    layers = blocks(count)
    states = LayerStates()
    stages = [
        Stage(layers[i * per_stage : (i + 1) * per_stage], i * per_stage, CPU, states=states)
        for i in range(num_stages)
    ]
    compiler = Compiler()
    start = time.perf_counter()
    compiled = compiler.compile(stages, [BoundarySpec((TensorSpec.of(torch.randn(2, 128, 256), True),))])
    traced = time.perf_counter()
    assert not isinstance(compiled, CompilationFailure), compiled
    for stage in compiled[0]:
        stage.segment(FULL_RECOMPUTE)
    lowered = time.perf_counter()
    name = f"{num_stages} stages of {per_stage}"
    return [name, compiler.num_traces, traced - start, lowered - traced, ""]


def main() -> None:
    torch.set_num_threads(1)
    trace(blocks(1), [torch.randn(2, 128, 256)])  # warms up PyTorch's lazy imports and registrations
    rows = [one_stage(count) for count in (2, 8, 24)]
    rows += [equal_stages(24, num_stages) for num_stages in (2, 4, 12)]
    report(globals(), ["blocks", "traces", "trace, s", "split and lower, s", "steps"], rows)
