"""Bytes and launches of programs, compared with manual counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gpipe_fast._extension import ActiveRuns
from gpipe_fast.kernels.stack import _stack
from gpipe_fast.lower.launch import KernelLaunch
from gpipe_fast.lower.program import ProgramIR, StorageKind, Value
from gpipe_fast.lower.steps import (
    Accumulate,
    AccumulateAll,
    AdoptAsAccumulator,
    Allocate,
    Call,
    Check,
    Launch,
    Ref,
    Release,
    Step,
)
from gpipe_fast.lower.work import Work, count
from tools.fusion import Row, cells, left, tables

aten = torch.ops.aten
ALWAYS = ActiveRuns.ALWAYS


class Builder:
    """Builds a program from steps and values."""

    def __init__(self) -> None:
        self.program = ProgramIR("program")

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


def test_returned_results_are_written_unless_unused() -> None:
    build = Builder()
    x, weight = build.add(8, 4), build.add(4)
    y, mean = build.add(8, 4), build.add(8, 1)
    arguments = (Ref(x), [4], Ref(weight), None, 1e-5)
    work = build.count(call(aten.native_layer_norm.default, *arguments, results=(y, mean, None)))
    assert (work.read, work.written) == (128 + 16, 128 + 32)
    assert work.moved_by == {"native_layer_norm": 304}


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


def test_products_and_attention_count_as_launches_only() -> None:
    build = Builder()
    x, out = build.add(4, 4), build.add(4, 4)
    attended = call(
        aten._scaled_dot_product_flash_attention.default,
        *refs(x, x, x),
        0.0,
        True,
        False,
        None,
        results=(out, None, None, None, None, None, None, None, None),
    )
    work = build.count(call(aten.mm.out, *refs(x, x, out)), attended)
    assert (work.moved, work.launches) == (0, 2)
    assert work.launches_of == {"mm": 1, "_scaled_dot_product_flash_attention": 1}


def test_rows_that_a_loss_only_indexes_are_not_read() -> None:
    build = Builder()
    rows, targets = build.add(8, 100), build.add(8, dtype=torch.int64)
    results = (build.add(), build.add())
    arguments = (*refs(rows, targets), None, 1, -100)
    forward = call(aten.nll_loss_forward.default, *arguments, results=results)
    assert (build.count(forward).read, build.count(forward).written) == (64, 8)


def test_a_launch_reads_its_arguments_except_outputs() -> None:
    build = Builder()
    x, y, sums = build.add(8, 4, dtype=torch.bfloat16), build.add(8, 4), build.add(2, 4)
    launch = KernelLaunch(_stack, (), (), (), 4, 2, grid=(8, 1, 1), outputs=(2, 4), aligned=())
    step = Launch(launch, (Ref(x), 1e-5, Ref(y), Ref(x), Ref(sums)), ALWAYS, None)
    work = build.count(step, Check(lambda inputs, results: None, (x,), (y, sums)))
    assert (work.read, work.written, work.launches) == (64, 128 + 32, 1)
    assert work.moved_by == {launch.name: 224}
    assert launch.name == "stack._stack"
    assert build.count(replace(step, when=ActiveRuns.FIRST)).launches == 0


def test_steps_of_the_first_run_and_without_a_kernel_are_not_counted() -> None:
    build = Builder()
    gradient, value = build.add(10), build.add(10, dtype=torch.bfloat16)
    first = Call(aten.copy_.default, (Ref(gradient), Ref(value), False), None, ActiveRuns.FIRST, None)
    work = build.count(
        Allocate(gradient, ALWAYS),
        first,
        Accumulate(gradient, value, ActiveRuns.FIRST),
        AccumulateAll((gradient,), (value,), ActiveRuns.FIRST),
        AdoptAsAccumulator(gradient, value),
        Release(value),
    )
    assert (work.moved, work.launches) == (0, 0)


def test_accumulations_read_both_and_write_the_accumulators() -> None:
    build = Builder()
    a, b, x, y = build.add(10), build.add(3), build.add(10, dtype=torch.bfloat16), build.add(3)
    work = build.count(Accumulate(a, x, ActiveRuns.LATER))
    assert (work.read, work.written, work.launches) == (60, 40, 1)
    work = build.count(AccumulateAll((a, b), (x, y), ActiveRuns.LATER))
    assert (work.read, work.written, work.launches_of) == (60 + 24, 52, {"accumulate": 1})


@pytest.fixture
def row() -> Row:
    before = Work(3_000_000, 1_000_000, {"mul": 4_000_000}, {"mul": 2, "mm": 1})
    after = Work(500_000, 500_000, {"mul": 250_000, "add": 750_000}, {"mul": 1, "add": 2, "mm": 1})
    return Row("GPT", "bf16", "backward_recompute", before, after)


def test_the_table_shows_what_fusion_removes(row: Row) -> None:
    expected = ["GPT", "bf16", "4.0", "1.0", "75%", 3, 4]
    assert cells(row) == expected
    forward = Row("GPT", "bf16", "forward", row.after, row.after)
    backward_cells, forward_table = tables([forward, row])
    assert backward_cells == [expected]
    assert list(forward_table.rows) == [["GPT", "bf16", "1.0", "1.0", "0%", 4, 4]]


def test_remaining_operators_are_listed_by_bytes(row: Row) -> None:
    assert left(row.after) == [["add", "0.8", "75.0%", 2], ["mul", "0.2", "25.0%", 1]]


def test_a_matrix_to_which_a_product_is_added_is_read() -> None:
    build = Builder()
    a, b, bias, total = build.add(4, 8), build.add(8, 2), build.add(2), build.add(4, 2)
    assert build.count(call(aten.addmm.out, *refs(bias, a, b), 1, 1, Ref(total))).moved == 0
    assert build.count(call(aten.mm.out, *refs(a, b, total))).moved == 0
    work = build.count(call(aten.addmm.out, *refs(total, a, b), 1, 1, Ref(total)))
    assert (work.read, work.written, work.launches) == (32, 0, 1)
    accumulator = replace(build.program.values[total], storage=StorageKind.ACCUMULATOR)
    build.program.values[total] = accumulator
    assert build.count(call(aten.addmm.out, *refs(total, a, b), 1, 1, Ref(total))).moved == 0
