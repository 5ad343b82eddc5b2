"""Explanations as data: what fused kernels compute in the stages of a model; and as text and HTML."""

from __future__ import annotations

import dataclasses
import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_fast.reports.tables import Printed, Table, plain

_UNCOUNTED = ("matrix product", "convolution", "fused attention")
_WIDTH = 56
_FUSED, _LEFT = ("fused operators", "kernels", "where", "MB saved"), ("left", "where", "MB", "why")
_TEXTS = (*_FUSED[:3], *_LEFT[:2], _LEFT[3])
_SUMMARY = (
    "direction",
    "micro-batches",
    "MB before",
    "MB after",
    "saved",
    "launches before",
    "launches after",
)


@dataclass(frozen=True)
class FusedGroup:
    """Operators that kernels compute together, in one place or in several places alike.

    Attributes:
        operators: the operators, in order, as ``native_layer_norm``; or words for a family, as ``rotary``.
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

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes as dicts, lists, strings and numbers, which ``json.dumps`` accepts."""
        found: dict[str, Any] = plain(self)
        return found

    def _parts(self) -> Iterator[str | Table]:
        """Yields lines and tables; stages that are alike are shown once."""
        yield f"What is fused on {self.device}, {self.settings}; bytes are for one micro-batch"
        yield from (textwrap.fill(note, 110) for note in self.notes)
        for title, stage in _alike(self.stages):
            yield title
            if stage.note:
                yield textwrap.fill(stage.note, 110)
            for table in _tables(stage):
                yield table._replace(rows=[[textwrap.fill(cell, _WIDTH) for cell in r] for r in table.rows])


def _alike(stages: Iterable[StageExplanation]) -> list[tuple[str, StageExplanation]]:
    """Returns stages with their titles; stages that differ in their layers' numbers only are one."""
    found: dict[object, list[StageExplanation]] = {}
    for stage in stages:
        found.setdefault(_relative(stage), []).append(stage)
    titles = []
    for same in found.values():
        first = same[0]
        numbers = ", ".join(str(stage.index) for stage in same)
        alike = f"Stages {numbers}, which are alike; layers are those of stage {first.index}"
        title = alike if len(same) > 1 else f"Stage {first.index}"
        titles.append((f"{title}: {_classes(first)}", first))
    return titles


def _relative(stage: StageExplanation) -> object:
    """Returns a stage without its number and its kernels' hashes, with layers counted from its first."""

    def program(each: ProgramExplanation) -> ProgramExplanation:
        fused = (
            dataclasses.replace(
                g,
                layers=tuple(tuple(n - stage.first_layer for n in place) for place in g.layers),
                kernels=tuple(re.sub("_[0-9a-f]{8}$", "", kernel) for kernel in g.kernels),
            )
            for g in each.fused
        )
        left = (
            dataclasses.replace(g, layers=tuple(n - stage.first_layer for n in g.layers)) for g in each.left
        )
        return dataclasses.replace(each, fused=tuple(fused), left=tuple(left))

    programs = tuple(map(program, stage.programs))
    return stage.layers, stage.device.partition(":")[0], stage.note, programs


def _classes(stage: StageExplanation) -> str:
    names = ", ".join(_counted(stage.layers))
    return f"{_where([stage.first_layer + i for i in range(len(stage.layers))])} ({names})"


def _where(layers: Sequence[int]) -> str:
    """Returns layers in words: ``layers 0 to 3 and 7``."""
    if not layers:
        return ""
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return f"layer{'s' if len(set(layers)) > 1 else ''} {', '.join(texts)}"


def _tables(stage: StageExplanation) -> list[Table]:
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
            tables.append(Table(f"{name}: fused", _FUSED, [*map(_fused_row, program.fused)], _TEXTS))
        if program.left:
            tables.append(Table(f"{name}: left to PyTorch", _LEFT, _left_rows(program.left), _TEXTS))
    return tables


def _summary(program: ProgramExplanation) -> list[str]:
    before, after = program.bytes_before, program.bytes_after
    share = f"{1 - after / before:.0%}" if before else "0%"
    launches = program.launches_before, program.launches_after
    return [program.direction, str(program.microbatches), _mb(before), _mb(after), share, *map(str, launches)]


def _fused_row(group: FusedGroup) -> list[str]:
    layers = [layer for place in group.layers for layer in place]
    times = f"{len(group.layers)} x in " if len(group.layers) > 1 else ""
    kernels = ", ".join(_counted(group.kernels)) or "none: PyTorch's operators in another order"
    where = f"{times}{_where(layers)}" if layers else times.removesuffix(" in ")
    return [", ".join(_counted(group.operators)), kernels, where, _mb(group.saved_bytes)]


def _counted(names: Sequence[str]) -> list[str]:
    """Returns names with runs of equal ones as one."""
    return [_times(len([*same]), name) for name, same in itertools.groupby(names)]


def _times(count: int, name: str) -> str:
    return name if count == 1 else f"{count} x {name}"


def _left_rows(groups: Sequence[LeftGroup]) -> list[list[str]]:
    """Returns a row for each group, and one for each kind of operator whose bytes are not counted."""
    rows = [
        [_times(g.count, g.operator), _where(g.layers), _mb(g.bytes), g.reason]
        for g in groups
        if g.reason not in _UNCOUNTED
    ]
    for kind in _UNCOUNTED:
        same = [g for g in groups if g.reason == kind]
        if same:
            names = ", ".join(_times(g.count, g.operator) for g in same)
            layers = [layer for g in same for layer in g.layers]
            rows.append([names, _where(layers), "not counted", f"{kind}: PyTorch's own kernels compute it"])
    return rows


def _mb(size: int) -> str:
    if abs(size) >= 5e4 or not size:
        return f"{size / 1e6:.1f}"
    return f"{size / 1e6:.1g}"
