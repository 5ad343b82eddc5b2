"""Explanations as text for a terminal, and as HTML for a notebook."""

from __future__ import annotations

import dataclasses
import html
import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from gpipe_fast.explanation.stages import FusedGroup, LeftGroup, ProgramExplanation, StageExplanation

_UNCOUNTED = ("matrix product", "convolution", "fused attention")
_WIDTH = 56
_FUSED, _LEFT = ("fused operators", "kernels", "where", "MB saved"), ("left", "where", "MB", "why")
_TEXTS = ("direction", *_FUSED[:3], *_LEFT[:2], _LEFT[3])
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
class _Table:
    heading: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


def text_of(headline: str, notes: Sequence[str], stages: Sequence[StageExplanation]) -> str:
    """Returns an explanation as text."""
    parts = [headline, *(textwrap.fill(note, 110) for note in notes)]
    for title, stage in _alike(stages):
        parts.append(title)
        if stage.note:
            parts.append(textwrap.fill(stage.note, 110))
        for table in _tables(stage):
            rows = [[textwrap.fill(cell, _WIDTH) for cell in row] for row in table.rows]
            aligned = ["left" if header in _TEXTS else "right" for header in table.headers]
            drawn = tabulate(rows, table.headers, "simple", colalign=aligned, disable_numparse=True)
            parts.append(f"{table.heading}\n{drawn}" if table.heading else drawn)
    return "\n\n".join(parts)


def html_of(headline: str, notes: Sequence[str], stages: Sequence[StageExplanation]) -> str:
    """Returns an explanation as HTML."""
    escape = html.escape
    parts = [f"<p>{escape(text)}</p>" for text in (headline, *notes)]
    for title, stage in _alike(stages):
        parts.append(f"<h4>{escape(title)}</h4>")
        if stage.note:
            parts.append(f"<p>{escape(stage.note)}</p>")
        for table in _tables(stage):
            head = "".join(f"<th>{escape(header)}</th>" for header in table.headers)
            rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table.rows)
            body = "".join(f"<tr>{row}</tr>" for row in rows)
            heading = f"<p>{escape(table.heading)}</p>" if table.heading else ""
            parts.append(f"{heading}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    return "\n".join(parts)


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
    runs = [(name, len([*same])) for name, same in itertools.groupby(stage.layers)]
    names = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in runs)
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


def _tables(stage: StageExplanation) -> list[_Table]:
    if not stage.programs:
        return []
    tables = [_Table("", _SUMMARY, [_summary(program) for program in stage.programs])]
    most = max(program.microbatches for program in stage.programs)
    shown: dict[str, ProgramExplanation] = {}
    for program in stage.programs:
        if program.microbatches == most:
            shown.setdefault(program.direction.split()[0], program)
    # The tables of micro-batches that checkpoint otherwise are much alike; `to_dict` has them.
    for program in shown.values():
        name = f"{program.direction[:1].upper()}{program.direction[1:]}"
        if program.fused:
            tables.append(_Table(f"{name}: fused", _FUSED, [*map(_fused_row, program.fused)]))
        if program.left:
            tables.append(_Table(f"{name}: left to PyTorch", _LEFT, _left_rows(program.left)))
    return tables


def _summary(program: ProgramExplanation) -> list[str]:
    before, after = program.bytes_before, program.bytes_after
    share = f"{1 - after / before:.0%}" if before else "0%"
    launches = program.launches_before, program.launches_after
    return [program.direction, str(program.microbatches), _mb(before), _mb(after), share, *map(str, launches)]


def _fused_row(group: FusedGroup) -> list[str]:
    layers = sorted({layer for place in group.layers for layer in place})
    times = f"{len(group.layers)} x in " if len(group.layers) > 1 else ""
    kernels = ", ".join(_counted(group.kernels)) or "none: PyTorch's operators in another order"
    where = f"{times}{_where(layers)}" if layers else times.removesuffix(" in ")
    return [", ".join(_counted(group.operators)), kernels, where, _mb(group.saved_bytes)]


def _counted(names: Sequence[str]) -> list[str]:
    """Returns names with runs of equal ones as one."""
    runs = [(name, len([*same])) for name, same in itertools.groupby(names)]
    return [name if count == 1 else f"{count} x {name}" for name, count in runs]


def _left_rows(groups: Sequence[LeftGroup]) -> list[list[str]]:
    """Returns a row for each group, and one for each kind of operator whose bytes are not counted."""
    rows = [_left_row(g) for g in groups if g.reason not in _UNCOUNTED]
    for kind in _UNCOUNTED:
        same = [g for g in groups if g.reason == kind]
        if same:
            names = ", ".join(f"{g.count} x {g.operator}" if g.count > 1 else g.operator for g in same)
            layers = sorted({layer for g in same for layer in g.layers})
            rows.append([names, _where(layers), "not counted", f"{kind}: PyTorch's own kernels compute it"])
    return rows


def _left_row(group: LeftGroup) -> list[str]:
    name = group.operator if group.count == 1 else f"{group.count} x {group.operator}"
    return [name, _where(group.layers), _mb(group.bytes), group.reason]


def _mb(size: int) -> str:
    if abs(size) >= 5e4 or not size:
        return f"{size / 1e6:.1f}"
    return f"{size / 1e6:.1g}"
