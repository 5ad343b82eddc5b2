"""What fused kernels compute in the stages of a model, for its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from gpipe_fast.fuse import left_out
from gpipe_fast.fuse.availability import fusion_of
from gpipe_fast.gpipe import GPipe
from gpipe_fast.runtime.stage import Stage

if TYPE_CHECKING:
    from gpipe_fast.fuse.fuse import Replaced


def fused_lines(model: GPipe) -> list[str]:
    """Returns report lines on the fused kernels of a model: for each graph, what they compute and save."""
    if all(device.type == "cpu" for device in model.devices):
        return []
    if not model.fuse:
        return ["none, because fuse=False"]
    if all(fusion_of(device) is None for device in model.devices):
        return ["none, because they need Triton, CUDA 12.8 and GPUs of compute capability 8.0"]
    if torch.are_deterministic_algorithms_enabled():
        return ["none, because only deterministic algorithms are allowed"]
    lines = list(dict.fromkeys(_line(*each) for each in replaced_by_graph(model)))
    lines += [f"left out: {kernel}" for kernel in left_out.names()]
    return lines or ["unknown until the first call"]


def replaced_by_graph(model: GPipe) -> Iterator[tuple[Stage, str, Sequence[Replaced]]]:
    """Yields each stage, each of its graphs, and what fused kernels replace in it."""
    for compiled in model._planner.lowered():
        for lowered in compiled.traced.lowered.values():
            for graph, replaced in lowered.replaced.items():
                yield compiled.stage, graph, replaced


def _line(stage: Stage, graph: str, replaced: Sequence[Replaced]) -> str:
    counts = Counter(each.name for each in replaced)
    kinds = "; ".join(f"{count} x {kind}" for kind, count in counts.items())
    saved = sum(each.saved for each in replaced) / 2**20
    last = stage.first_layer + len(stage.layers) - 1
    where = f"layer {last}" if last == stage.first_layer else f"layers {stage.first_layer} to {last}"
    return f"{where}, {graph}: {kinds or 'none'} ({saved:.1f} MiB less traffic)"
