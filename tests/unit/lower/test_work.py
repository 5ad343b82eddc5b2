"""Bytes and launches of programs, compared with manual counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gpipe_fast._extension import ActiveRuns
from gpipe_fast.kernels.partial_sums import _add_partials
from gpipe_fast.lower.launch import KernelLaunch
from gpipe_fast.lower.program import ProgramIR, StorageKind, Value
from gpipe_fast.lower.steps import (
    Call,
    Check,
    Launch,
    Ref,
    Step,
)
from gpipe_fast.lower.work import Work, count

aten = torch.ops.aten
ALWAYS = ActiveRuns.ALWAYS


class Builder:
    """Builds a program from steps and values."""

    def __init__(self) -> None:
        self.program = ProgramIR()

    def add(
        self,
        *sizes: int,
        strides: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
        base: int | None = None,
        offset: int = 0,
    ) -> int:
        strides = strides or torch.empty(sizes, device="meta").stride()
        storage = StorageKind.ARENA if base is None else StorageKind.VIEW
        value = Value("value", storage, sizes, strides, dtype, base or 0, offset)
        self.program.values.append(value)
        return len(self.program.values) - 1

    def count(self, *steps: Step) -> Work:
        self.program.steps = list(steps)
        return count(self.program)


def call(op: Any, *arguments: Any, results: tuple[int | None, ...] | None = None) -> Call:
    return Call(op, arguments, results, ALWAYS, None)


def refs(*values: int) -> list[Ref]:
    return [Ref(value) for value in values]


def test_out_arguments_are_written_and_not_read() -> None:
    build = Builder()
    x, y, out = build.add(8, 4), build.add(8, 4, dtype=torch.bfloat16), build.add(8, 4)
    work = build.count(call(aten.mul.out, *refs(x, y, out)))
    assert (work.read, work.written, work.launches) == (128 + 64, 128, 1)
    work = build.count(call(aten.copy_.default, *refs(out, y), False))
    assert (work.read, work.written) == (64, 128)
    work = build.count(call(aten.add_.Tensor, *refs(out, y), 1))
    assert (work.read, work.written) == (128 + 64, 128)


def test_bytes_of_products_are_not_counted() -> None:
    build = Builder()
    x, y, out = build.add(8, 4), build.add(4, 2), build.add(8, 2)
    work = build.count(call(aten.mm.out, *refs(x, y, out)))
    assert (work.moved, work.launches) == (0, 1)


def test_shared_memory_is_read_once_and_expanded_dimensions_count_one_element() -> None:
    build = Builder()
    x, out = build.add(8, 4), build.add(8, 4)
    assert build.count(call(aten.mul.out, *refs(x, x, out))).read == 128
    flat, right = build.add(32, base=x), build.add(8, 2, strides=(4, 1), base=x, offset=2)
    assert build.count(call(aten.mul.out, *refs(x, flat, out))).read == 128
    assert build.count(call(aten.mul.out, *refs(right, x, out))).read == 128
    left_half = build.add(8, 2, strides=(4, 1), base=x)
    assert build.count(call(aten.mul.out, *refs(right, right, out))).read == 64
    assert build.count(call(aten.cat.out, refs(left_half, right), 1, Ref(out))).read == 128
    expanded = build.add(8, 4, strides=(1, 0), base=x)
    assert build.count(call(aten.mul.out, *refs(expanded, out, out))).read == 32 + 128
    empty = build.add(0, 4, strides=(0, 1))
    assert build.count(call(aten.cat.out, refs(x, empty), 0, Ref(out))).read == 128


def test_a_launch_reads_its_arguments_except_outputs() -> None:
    build = Builder()
    x, y, sums = build.add(8, 4, dtype=torch.bfloat16), build.add(8, 4), build.add(2, 4)
    launch = KernelLaunch(_add_partials, (), (), (), 4, 2, grid=(8, 1, 1), outputs=(2, 4), aligned=())
    step = Launch(launch, (Ref(x), 1e-5, Ref(y), Ref(x), Ref(sums)), ALWAYS, None)
    work = build.count(step, Check(lambda inputs, results: None, (x,), (y, sums)))
    assert (work.read, work.written, work.launches) == (64, 128 + 32, 1)
    assert work.moved_by == {launch.name: 224}
    assert launch.name == "partial_sums._add_partials"
    assert build.count(replace(step, when=ActiveRuns.FIRST)).launches == 0
