"""Explains a call of a model: compiles its stages, perhaps for a device that the machine lacks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpipe_fast import progress
from gpipe_fast.fuse.availability import why_unfused
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE, NO_RECOMPUTE, SavedFraction, has_recompute
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.split import JOINT_POSITION, StageGraph, split
from gpipe_fast.lower.work import Work, count
from gpipe_fast.reports.explanation import (
    Explanation,
    FusedGroup,
    LeftGroup,
    ProgramExplanation,
    StageExplanation,
)
from gpipe_fast.runtime.compile import CompilationFailure
from gpipe_fast.runtime.compiled import CompiledStage
from gpipe_fast.runtime.module_warnings import InPython
from gpipe_fast.runtime.planner import Call, Planner
from gpipe_fast.runtime.stage import Stage
from gpipe_fast.strides import empty_like
from gpipe_fast.torch_private.fake_tensors import FakeTensorMode
from gpipe_fast.trace.absent_device import backward_without_gpu
from gpipe_fast.trace.traceability import layer_of

if TYPE_CHECKING:
    from gpipe_fast.fuse.fuse import Fused

_ON_CPU = (
    "To see what would be fused on a GPU, which this machine need not have, call explain with device='cuda'."
)
_ASSUMED = (
    "The machine has no GPU: a GPU of compute capability 9.0 with 132 multiprocessors (H100) is assumed. "
    "Attention is by the operator that PyTorch prefers there: cuDNN's in 16 bits, else the memory-efficient "
    "one. Results have the memory layouts of PyTorch's fake kernels. No operator has run."
)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor like another one, on another device; for a fake mode."""
    return empty_like(tensor, device).requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def on_absent_device(call: Call, device: torch.device) -> Iterator[Call]:
    """Returns a call with its inputs on a GPU that the machine need not have, and lets it be traced there.

    Autocast for the CPU counts as autocast for the GPU.
    """
    with FakeTensorMode():
        inputs = call.inputs._replace(tensors=[_moved(x, device) for x in call.inputs.tensors])
        given = tuple(_moved(x, device) for x in call.given)
    with _autocast_on_gpu(), backward_without_gpu():
        yield replace(call, inputs=inputs, given=given)


@contextlib.contextmanager
def _autocast_on_gpu() -> Iterator[None]:
    """Takes the CPU's autocast mode for the GPU's, since PyTorch enables no autocast for an absent GPU."""
    if torch.is_autocast_enabled("cuda") or not torch.is_autocast_enabled("cpu"):
        yield
        return
    dtype = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.get_autocast_dtype("cpu"))
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", dtype)


def explain_call(planner: Planner, call: Call, device: torch.device | None) -> Explanation:
    """Explains a call.

    Args:
        planner: the model's planner, or one of stages on the device that is named.
        call: the call.
        device: the device that is named; None for the devices of the stages.
    """
    stages = planner.stages
    with contextlib.ExitStack() as stack:
        stack.enter_context(progress.first_call([len(s.layers) for s in stages], what="an explanation"))
        if device is not None:
            call = stack.enter_context(on_absent_device(call, device))
        compiled = None
        if planner.backend != "eager" and any(stage.device.type != "cpu" for stage in stages):
            call.state.update_key()  # under these modes
            compiled = planner.compile(call)
        fractions = call.saved_fractions
        found = tuple(
            _explained(index, stage, compiled, fractions[index]) for index, stage in enumerate(stages)
        )
        settings = _settings(fractions)
    devices = ", ".join(dict.fromkeys(str(stage.device) for stage in stages))
    assumes = device is not None and not torch.cuda.is_available()
    return Explanation(devices, settings, (_ASSUMED,) if assumes else (), found)


def _settings(fractions: Sequence[Sequence[SavedFraction]]) -> str:
    """Returns the precision, the micro-batches and the mode of a call in words."""
    kinds = ("cuda", "cpu")
    autocast = [str(torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)]
    dtype = f", autocast to {autocast[0].removeprefix('torch.')}" if autocast else ""
    number = len(fractions[0])
    recomputed = sum(any(map(has_recompute, each)) for each in zip(*fractions, strict=True))
    mode = "" if torch.is_grad_enabled() else ", without gradients"
    if recomputed:
        mode = f", {recomputed} of them recomputed"
    return f"{number} micro-batch{'es' if number > 1 else ''}{mode}{dtype}"


def _explained(
    index: int,
    stage: Stage,
    compiled: Sequence[Sequence[CompiledStage]] | CompilationFailure | None,
    fractions: Sequence[SavedFraction],
) -> StageExplanation:
    reason = why_unfused(stage.device, stage.options.fuse, stage.options.is_absent)
    unfused = f"Nothing is fused, because {reason}." if reason else ""
    if stage.device.type == "cpu":
        return _described(index, stage, f"{unfused} {_ON_CPU}")
    if compiled is None:
        note = "Nothing is fused, because all layers run in Python: backend='eager'."
        return _described(index, stage, note + _saving_note(fractions))
    if isinstance(compiled, CompilationFailure):
        note = _failure_note(index, stage, compiled)
        is_here = compiled.stage_index == index
        return _described(index, stage, note + (_saving_note(fractions) if is_here else ""))
    progress.step("splitting", stage.first_layer, len(stage.layers))
    programs = [
        program
        for fraction, number in Counter(fractions).items()
        for program in explain_programs(compiled[0][index], fraction, number)
    ]
    return _described(index, stage, unfused, programs)


def _described(
    index: int, stage: Stage, note: str, programs: Sequence[ProgramExplanation] = ()
) -> StageExplanation:
    names = tuple(type(layer).__name__ for layer in stage.layers)
    return StageExplanation(index, names, stage.first_layer, str(stage.device), note, tuple(programs))


def _failure_note(index: int, stage: Stage, failure: CompilationFailure) -> str:
    if failure.stage_index != index:
        return (
            f"Unknown until the first call, because a layer of stage {failure.stage_index} runs in Python, "
            "and what it returns is known only then."
        )
    why = str(InPython.of(index, stage, failure.untraceable.layer, failure.untraceable.reason))
    return (
        f"{why[0].upper()}{why[1:]}. Nothing is fused in it. The layers around it are fused, but how is "
        "known only when the first call shows what it returns."
    )


def _saving_note(fractions: Sequence[SavedFraction]) -> str:
    """Returns what saving some activations means to layers in Python; nothing if all or none are saved."""
    if {FULL_RECOMPUTE, NO_RECOMPUTE}.issuperset(fractions):
        return ""
    return " If any activation of a micro-batch is recomputed, layers in Python save nothing."


def explain_programs(
    compiled: CompiledStage, saved_fraction: SavedFraction, microbatches: int
) -> list[ProgramExplanation]:
    """Explains a stage's forward and backward.

    Args:
        compiled: the stage.
        saved_fraction: the fraction of activations that the micro-batches save.
        microbatches: the number of these micro-batches.
    """
    traced, first = compiled.traced, compiled.stage.first_layer
    plain = split(traced.joint, saved_fraction)
    parts, fused = traced.fuse(saved_fraction, explain=True)
    programs = []
    for index, (before, graph) in enumerate(
        [(plain.forward_saving, parts.forward_saving), (plain.backward, parts.backward)]
    ):
        if before is None or graph is None:
            continue
        accumulation = [traced.accumulation] if index else []
        found = None if fused is None else fused[index]
        work = [count(lower(g, *accumulation)) for g in (before, graph if found is None else found.graph)]
        backward = "backward with recompute" if has_recompute(saved_fraction) else "backward"
        direction = backward if index else "forward"
        programs.append(_program(direction, microbatches, work, graph, found, first))
    return programs


def _program(
    direction: str,
    microbatches: int,
    work: Sequence[Work],
    graph: StageGraph,
    fused: Fused | None,
    first: int,
) -> ProgramExplanation:
    before, after = work
    return ProgramExplanation(
        direction,
        microbatches,
        before.moved,
        after.moved,
        before.launches,
        after.launches,
        () if fused is None else tuple(_fused_groups(fused, _layers(graph), first)),
        () if fused is None else tuple(_left_groups(fused, first)),
    )


def _layers(graph: StageGraph) -> dict[int, int]:
    """Returns, by position in the joint graph, a node's layer within the stage."""
    found = {}
    for node in graph.module.graph.nodes:
        layer = layer_of(node)
        if layer is not None and JOINT_POSITION in node.meta:
            found[node.meta[JOINT_POSITION]] = layer
    return found


def _fused_groups(fused: Fused, layers: Mapping[int, int], first: int) -> Iterator[FusedGroup]:
    places: dict[tuple[tuple[str, ...], tuple[str, ...]], list[tuple[int, ...]]] = {}
    saved: dict[tuple[tuple[str, ...], tuple[str, ...]], int] = {}
    for each in fused.replaced:
        key = tuple(each.name.split(", ")), each.kernels
        own = sorted({first + layers[p] for p in each.positions if p in layers})
        places.setdefault(key, []).append(tuple(own))
        saved[key] = saved.get(key, 0) + each.saved
    for operators, kernels in sorted(places, key=lambda key: -saved[key]):
        key = operators, kernels
        yield FusedGroup(operators, kernels, tuple(places[key]), saved[key])


def _left_groups(fused: Fused, first: int) -> list[LeftGroup]:
    groups: dict[tuple[str, str], list[tuple[int | None, int]]] = {}
    for each in fused.left:
        groups.setdefault((each.operator, each.reason), []).append((each.layer, each.bytes))
    found = [
        LeftGroup(
            operator,
            len(nodes),
            tuple(sorted({first + layer for layer, _ in nodes if layer is not None})),
            sum(size for _, size in nodes),
            reason,
        )
        for (operator, reason), nodes in groups.items()
    ]
    return sorted(found, key=lambda group: -group.bytes)
