"""Explanations: what fused kernels compute in the stages of a model, perhaps on a GPU that is not there."""

from __future__ import annotations

import contextlib
import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpipe_fast import progress
from gpipe_fast.fuse.availability import why_unfused
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE, NO_RECOMPUTE, SavedFraction, has_recompute
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.split import JOINT_POSITION, StageGraph, split
from gpipe_fast.lower.work import count
from gpipe_fast.reports.tables import Printed, Table
from gpipe_fast.runtime.compiled import CompiledStage
from gpipe_fast.runtime.module_warnings import InPython
from gpipe_fast.runtime.planner import Call, Planner
from gpipe_fast.runtime.stage import Stage
from gpipe_fast.strides import empty_like
from gpipe_fast.torch_private.fake_tensors import FakeTensorMode
from gpipe_fast.trace.absent_device import backward_without_gpu
from gpipe_fast.trace.traceability import Untraceable, layer_of

if TYPE_CHECKING:
    from gpipe_fast.fuse.fuse import Fused

_UNCOUNTED = ("matrix product", "convolution", "fused attention")
_WIDTH = 56
_FUSED, _LEFT = ("fused operators", "kernels", "where", "MB saved"), ("left", "where", "MB", "why")
_TEXTS = (*_FUSED[:3], *_LEFT[:2], _LEFT[3])
_SUMMARY = (
    *("direction", "micro-batches", "MB before", "MB after", "saved", "launches before", "launches after"),
)
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


@dataclass(frozen=True)
class FusedGroup:
    """Operators that kernels compute together, in one place or in several places alike.

    Attributes:
        operators: the operators, in order, as ``native_layer_norm``; or words, as ``cross-entropy``.
        kernels: the names of the kernels, in the order of their launches.
        layers: for each place, the indices of its layers in the model.
        saved_bytes: how many bytes less are read and written, in all places.
    """

    operators: tuple[str, ...]
    kernels: tuple[str, ...]
    layers: tuple[tuple[int, ...], ...]
    saved_bytes: int


@dataclass(frozen=True)
class LeftGroup:
    """Operators of one name that are left to PyTorch for one reason.

    Attributes:
        operator: the operator, as ``addmm``.
        count: how many there are.
        layers: the indices of their layers in the model.
        bytes: the bytes that they read and write; 0 for products and fused attention, which are not counted.
        reason: why they are left.
    """

    operator: str
    count: int
    layers: tuple[int, ...]
    bytes: int
    reason: str


@dataclass(frozen=True)
class ProgramExplanation:
    """One direction of a stage, for the micro-batches that checkpoint alike.

    Attributes:
        direction: ``forward``, ``backward``, or ``backward with recompute``.
        microbatches: the number of micro-batches for which it runs in a mini-batch.
        bytes_before: the bytes that PyTorch's operators read and write for one micro-batch, except products,
            convolutions and fused attention.
        bytes_after: the bytes with fused kernels.
        launches_before: PyTorch's operators that launch kernels; each counts as one launch.
        launches_after: operators and kernels that are launched with fused kernels.
        fused: what kernels compute, most saved bytes first.
        left: what is left, most bytes first.
    """

    direction: str
    microbatches: int
    bytes_before: int
    bytes_after: int
    launches_before: int
    launches_after: int
    fused: tuple[FusedGroup, ...]
    left: tuple[LeftGroup, ...]


@dataclass(frozen=True)
class StageExplanation:
    """One stage.

    Attributes:
        index: the stage's index.
        layers: the class name of each layer.
        first_layer: the index of the first layer in the model.
        device: the device.
        note: why nothing is fused, or why layers run in Python; else "".
        programs: the forward and the backward; empty if the stage is not traced.
    """

    index: int
    layers: tuple[str, ...]
    first_layer: int
    device: str
    note: str
    programs: tuple[ProgramExplanation, ...]


@dataclass(frozen=True)
class Explanation(Printed):
    """What fused kernels compute in the stages of a model; ``print`` it, or show it in a notebook.

    Attributes:
        device: the device for which the model was explained.
        settings: the precision, the number of micro-batches and the checkpoint mode, in words.
        notes: what was assumed about a device that the machine lacks; and other remarks.
        stages: the stages.
    """

    device: str
    settings: str
    notes: tuple[str, ...]
    stages: tuple[StageExplanation, ...]

    def _parts(self) -> Iterator[str | Table]:
        """Yields lines and tables; stages that differ in their layers' numbers only are shown once."""
        yield f"What is fused on {self.device}, {self.settings}; bytes are for one micro-batch"
        yield from (textwrap.fill(note, 110) for note in self.notes)
        alike: dict[object, list[StageExplanation]] = {}
        for stage in self.stages:
            alike.setdefault(_without_place(stage), []).append(stage)
        for first, *others in alike.values():
            title = f"Stage {first.index}"
            if others:
                numbers = ", ".join(str(stage.index) for stage in (first, *others))
                title = f"Stages {numbers}, which are alike; layers are those of stage {first.index}"
            where = _where(range(first.first_layer, first.first_layer + len(first.layers)))
            yield f"{title}: {where} ({_counted(first.layers)})"
            if first.note:
                yield textwrap.fill(first.note, 110)
            for table in _tables(first, 0):
                yield table._replace(rows=[[textwrap.fill(cell, _WIDTH) for cell in r] for r in table.rows])


def _without_place(stage: StageExplanation) -> object:
    """Returns what is printed of a stage, without its number, its place and the hashes of kernels."""
    text = "\n".join(table.text() for table in _tables(stage, stage.first_layer))
    return stage.layers, stage.device.partition(":")[0], stage.note, re.sub("_[0-9a-f]{8}", "", text)


def _where(layers: Iterable[int], first: int = 0) -> str:
    """Returns layers in words, counted from the first: ``layers 0-3, 7``."""
    numbers = sorted({layer - first for layer in layers})
    runs = itertools.groupby(enumerate(numbers), key=lambda each: each[1] - each[0])
    ends = [(own[0][1], own[-1][1]) for own in ([*run] for _, run in runs)]
    texts = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ends)
    return f"layer{'s' * (len(numbers) > 1)} {texts}" if numbers else ""


def _tables(stage: StageExplanation, first: int) -> list[Table]:
    """Returns the tables of a stage, with layers counted from the first."""
    if not stage.programs:
        return []
    tables = [Table("", _SUMMARY, [_summary(program) for program in stage.programs])]
    most = max(program.microbatches for program in stage.programs)
    shown: dict[str, ProgramExplanation] = {}
    for program in stage.programs:
        if program.microbatches == most:
            shown.setdefault(program.direction.split()[0], program)
    # The tables of micro-batches that checkpoint otherwise are much alike; `to_dict` has them.
    for program in shown.values():
        name = f"{program.direction[:1].upper()}{program.direction[1:]}"
        if program.fused:
            rows = [_fused_row(group, first) for group in program.fused]
            tables.append(Table(f"{name}: fused", _FUSED, rows, _TEXTS))
        if program.left:
            rows = _left_rows(program.left, first)
            tables.append(Table(f"{name}: left to PyTorch", _LEFT, rows, _TEXTS))
    return tables


def _summary(program: ProgramExplanation) -> list[str]:
    before, after = program.bytes_before, program.bytes_after
    share = f"{1 - after / before:.0%}" if before else "0%"
    launches = program.launches_before, program.launches_after
    return [program.direction, str(program.microbatches), _mb(before), _mb(after), share, *map(str, launches)]


def _fused_row(group: FusedGroup, first: int) -> list[str]:
    kernels = _counted(group.kernels) or "none: PyTorch's operators in another order"
    where, count = _where(itertools.chain(*group.layers), first), len(group.layers)
    times = f"{count} x in {where}" if where else f"{count} x"
    return [_counted(group.operators), kernels, times if count > 1 else where, _mb(group.saved_bytes)]


def _counted(names: Sequence[str]) -> str:
    """Returns names with runs of equal ones as one."""
    return ", ".join(_times(len([*same]), name) for name, same in itertools.groupby(names))


def _times(count: int, name: str) -> str:
    return name if count == 1 else f"{count} x {name}"


def _left_rows(groups: Sequence[LeftGroup], first: int) -> list[list[str]]:
    """Returns a row for each group, and one for each kind of operator whose bytes are not counted."""
    rows = [
        [_times(g.count, g.operator), _where(g.layers, first), _mb(g.bytes), g.reason]
        for g in groups
        if g.reason not in _UNCOUNTED
    ]
    for kind in _UNCOUNTED:
        if same := [g for g in groups if g.reason == kind]:
            names = ", ".join(_times(g.count, g.operator) for g in same)
            where = _where((layer for g in same for layer in g.layers), first)
            rows.append([names, where, "not counted", f"{kind}: PyTorch's own kernels compute it"])
    return rows


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}" if abs(size) >= 5e4 or not size else f"{size / 1e6:.1g}"


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
        compiled: Sequence[Sequence[CompiledStage]] | Untraceable | None = None
        if planner.backend != "eager" and any(stage.device.type != "cpu" for stage in stages):
            call.state.update_key()  # under these modes
            try:
                compiled = planner.compile(call)
            except Untraceable as error:
                compiled = error.with_traceback(None)
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
    compiled: Sequence[Sequence[CompiledStage]] | Untraceable | None,
    fractions: Sequence[SavedFraction],
) -> StageExplanation:
    reason = why_unfused(stage.device, stage.options.fuse, stage.options.is_absent)
    note, programs = f"Nothing is fused, because {reason}." if reason else "", list[ProgramExplanation]()
    if stage.device.type == "cpu":
        note = f"{note} {_ON_CPU}"
    elif compiled is None:
        note = "Nothing is fused, because all layers run in Python: backend='eager'."
        note += _saving_note(fractions)
    elif isinstance(compiled, Untraceable):
        note = _failure_note(index, stage, compiled)
        note += _saving_note(fractions) if compiled.stage == index else ""
    else:
        progress.step("splitting", stage.first_layer, len(stage.layers))
        for fraction, number in Counter(fractions).items():
            programs += _programs(compiled[0][index], fraction, number)
    names = tuple(type(layer).__name__ for layer in stage.layers)
    return StageExplanation(index, names, stage.first_layer, str(stage.device), note, tuple(programs))


def _failure_note(index: int, stage: Stage, failure: Untraceable) -> str:
    if failure.stage != index:
        return (
            f"Unknown until the first call, because a layer of stage {failure.stage} runs in Python, "
            "and what it returns is known only then."
        )
    why = str(InPython.of(index, stage, failure.layer, failure.reason))
    return (
        f"{why[0].upper()}{why[1:]}. Nothing is fused in it. The layers around it are fused, but how is "
        "known only when the first call shows what it returns."
    )


def _saving_note(fractions: Sequence[SavedFraction]) -> str:
    """Returns what saving some activations means to layers in Python; nothing if all or none are saved."""
    if {FULL_RECOMPUTE, NO_RECOMPUTE}.issuperset(fractions):
        return ""
    return " If any activation of a micro-batch is recomputed, layers in Python save nothing."


def _programs(
    compiled: CompiledStage, saved_fraction: SavedFraction, microbatches: int
) -> Iterator[ProgramExplanation]:
    """Explains a stage's forward and backward for micro-batches that save a fraction of activations."""
    traced, first = compiled.traced, compiled.stage.first_layer
    plain = split(traced.joint, saved_fraction)
    parts, fused = traced.fuse(saved_fraction, explain=True)
    backward = "backward with recompute" if has_recompute(saved_fraction) else "backward"
    for index, (direction, before, graph) in enumerate(
        [("forward", plain.forward, parts.forward), (backward, plain.backward, parts.backward)]
    ):
        if before is None or graph is None:
            continue
        accumulation = [traced.accumulation] if index else []
        found = None if fused is None else fused[index]
        old, new = (count(lower(g, *accumulation)) for g in (before, graph if found is None else found.graph))
        groups = () if found is None else tuple(_fused_groups(found, graph, first))
        left = () if found is None else tuple(_left_groups(found, first))
        numbers = old.moved, new.moved, old.launches, new.launches
        yield ProgramExplanation(direction, microbatches, *numbers, groups, left)


def _fused_groups(fused: Fused, graph: StageGraph, first: int) -> list[FusedGroup]:
    layers = {  # by position in the joint graph
        node.meta[JOINT_POSITION]: first + layer
        for node in graph.module.graph.nodes
        if (layer := layer_of(node)) is not None and JOINT_POSITION in node.meta
    }
    found: dict[object, FusedGroup] = {}
    for each in fused.replaced:
        place = tuple(sorted({layers[p] for p in each.positions if p in layers}))
        new = FusedGroup(tuple(each.name.split(", ")), each.kernels, (), 0)
        own = found.get(key := (each.name, each.kernels), new)
        places, saved = (*own.layers, place), own.saved_bytes + each.saved
        found[key] = replace(own, layers=places, saved_bytes=saved)
    return sorted(found.values(), key=lambda group: -group.saved_bytes)


def _left_groups(fused: Fused, first: int) -> list[LeftGroup]:
    found: dict[object, LeftGroup] = {}
    for each in fused.left:
        own = found.get(key := (each.operator, each.reason), LeftGroup(each.operator, 0, (), 0, each.reason))
        layers = own.layers if each.layer is None else tuple(sorted({*own.layers, first + each.layer}))
        found[key] = replace(own, count=own.count + 1, layers=layers, bytes=own.bytes + each.bytes)
    return sorted(found.values(), key=lambda group: -group.bytes)
