"""Where the time of our steps on one GPU is: by kinds of kernels, beside what bare calls of libraries need.

`python -m bench where [row ...]` measures rows of `python -m bench cuda`, each in a process of its own, and
writes after each. With `--device cpu` it measures small models, without a profile.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from bench import measure
from bench.gpu import children, shares
from bench.gpu.bare import (
    Programs,
    bare_calls,
    bare_rows,
    kernel_names,
    microseconds,
    programs_of,
    work_of,
)
from bench.gpu.rows import RowBenchmark
from bench.gpu.subjects import OURS, PIPELINES, ROWS, UNCAPTURED, WARM_UP, Subject, Synchronized
from bench.measure import Table
from bench.peers import Step
from gpipe_fast import GPipe
from gpipe_fast.container import runner_of
from gpipe_fast.lower.work import Work

ORDER = (
    "gpt-8", "gpt-8-except-attention", "gpt-8-never", "tiny-never", "tiny-always", "gpt-wide",
    "llama", "resnet", "gpt-8-0.06", "gpt-8-0.5", "gpt-4", "gpt-32", "gpt-wide-never", "unet",
)  # fmt: skip
COPIED_BYTES, SMALL_COPIED_BYTES = 2 << 30, 1 << 20
CLOCK_SECONDS, ROUND_SECONDS, ROW_SECONDS = 1.0, 5.0, 120.0
STEPS = 10  # of which medians are taken
# The title and the headers of each table.
TABLES = {
    "step": (
        "the time of a step",
        ("candidate", "ms: median [p20, p80]", "kernels", *(f"{kind}, ms" for kind in shares.KINDS)),
    ),
    "calls": (
        "bare products and attention",
        ("operator", "operands", "in a step", "µs bare", "in a step, ms", "TFLOP/s"),
    ),
    "generated": (
        "generated kernels",
        ("kernel", "in a step", "in a step, ms", "MB", "GB/s", "of copy"),
    ),
    "capture": (
        "the halves of a step",
        ("candidate", "forward, host, ms", "forward, ms", "backward, host, ms", "backward, ms"),
    ),
}
NOTE = (
    "All stages share one device. Kernels are those of a profiled step, and their time is the union of their "
    "intervals (`bench/gpu/shares.py`); idle is the rest of the step. The bare sum adds the time of each "
    "distinct product and call of attention alone, on random numbers, times its number in the step. Bytes "
    "are counted in the lowered programs, without products and attention. The halves of a step are between "
    "events on the device, and on the host until the call returns.\n"
)


@dataclass(frozen=True)
class Steps:
    """The steps of a subject.

    Attributes:
        subject: the subject.
        device: the device of all stages.
        candidates: steps by the names of `PIPELINES`; uncaptured ones are among them.
    """

    subject: Subject
    device: str
    candidates: Mapping[str, Step]

    @classmethod
    def of(cls, row: str, device: str, names: Sequence[str]) -> Steps:
        """Returns steps of our candidates of a row after those that make plans and capture graphs."""
        subject = ROWS[row].full if device.startswith("cuda") else ROWS[row].small
        data = subject.data(device)
        own = [name for name in names if name in subject.names]
        found = {name: subject.ours(device, data, **PIPELINES[name]) for name in own}
        for step in found.values():
            for _ in range(WARM_UP):
                step()
        return cls(subject, device, found)

    def timed(self) -> dict[str, Synchronized]:
        """Returns the steps as functions that end when the device has finished."""
        return {name: Synchronized(step, self.device) for name, step in self.candidates.items()}

    def programs(self) -> Programs:
        """Returns the programs of a step, and how often each runs in it."""
        pipe = self.candidates[UNCAPTURED].forward
        assert isinstance(pipe, GPipe)
        return programs_of(runner_of(pipe).planner, pipe.checkpoint, self.subject.chunks)


def copy_rate(device: str) -> float:
    """Returns the bytes that a copy within the device reads and writes in a microsecond."""
    size = COPIED_BYTES if device.startswith("cuda") else SMALL_COPIED_BYTES
    source = torch.empty(size // 2, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return size / microseconds(lambda: target.copy_(source), device)


def step_rows(steps: Steps) -> tuple[list[list[object]], dict[str, list[shares.Interval]]]:
    """Returns the time and the kinds of kernels of each candidate, and its kernels."""
    timed, rows, kernels = steps.timed(), list[list[object]](), dict[str, list[shares.Interval]]()
    times = measure.samples(timed, STEPS, pause=measure.PAUSE, seconds=ROUND_SECONDS)
    generated = kernel_names(steps.programs())
    for name, step in timed.items():
        found = shares.profiled(step)
        kernels[name] = found.intervals
        kinds = shares.shares(found.intervals, found.begin, found.end, generated)
        shown = [f"{kinds[kind] / 1e3:.2f}" for kind in shares.KINDS] if found.intervals else ["-"] * 6
        rows.append([name, measure.timing(times[name]).ms(), len(found.intervals), *shown])
    return rows, kernels


def generated_times(steps: Steps, kernels: Sequence[shares.Interval]) -> dict[str, list[float]]:
    """Returns launches, microseconds and counted bytes in a step of each generated kernel by its name."""
    programs = steps.programs()
    names, work, times = kernel_names(programs), work_of(programs), shares.time_by_name(kernels)
    return {
        name: [*times.get(name, (0, 0.0)), work.moved_by[in_work]]
        for name, in_work in names.items()
        if in_work in work.moved_by
    }


def generated_rows(found: Mapping[str, Sequence[float]], copied: float) -> list[list[object]]:
    """Returns a row for each generated kernel, the longest first; `copied` is in bytes per microsecond."""
    return [
        [
            name,
            int(number),
            f"{taken / 1e3:.2f}",
            f"{size / 1e6:.0f}",
            *([f"{size / taken / 1e3:.0f}", f"{size / taken / copied:.0%}"] if taken else ["-", "-"]),
        ]
        for name, (number, taken, size) in sorted(found.items(), key=lambda item: -item[1][1])
    ]


def capture_rows(steps: Steps) -> list[list[object]]:
    """Returns the halves of a step of each candidate: medians in milliseconds, on the host and the device."""
    return [
        [name, *(f"{median(each):.2f}" if each else "-" for each in _halves(step, steps.device))]
        for name, step in steps.candidates.items()
    ]


def _halves(step: Step, device: str) -> list[list[float]]:
    """Returns the milliseconds of the forward on host and device, and those of the backward."""
    found: list[list[float]] = [[], [], [], []]

    def stamp() -> tuple[float, Any]:
        event = torch.cuda.Event(enable_timing=True) if device.startswith("cuda") else None
        if event is not None:
            event.record()
        return time.perf_counter(), event

    for _ in range(STEPS):
        for parameter in step.parameters:
            parameter.grad = None
        stamps = [stamp()]
        output = step.forward(step.input)
        stamps.append(stamp())
        output.backward(step.gradient)
        stamps.append(stamp())
        if stamps[-1][1] is not None:
            stamps[-1][1].synchronize()
        for half, ((begin, first), (end, last)) in enumerate(itertools.pairwise(stamps)):
            found[2 * half].append((end - begin) * 1e3)
            if first is not None:
                found[2 * half + 1].append(first.elapsed_time(last))
    return found


def clocks(run: Callable[[], object], device: str) -> str:
    """Returns the clock and the power of a GPU while a function runs again and again, as text."""
    if not device.startswith("cuda") or not shutil.which("nvidia-smi"):
        return ""
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    fields = "clocks.sm,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    command = f"nvidia-smi -i {gpu} --query-gpu={fields} --format=csv,noheader,nounits -lms 50"
    with subprocess.Popen(command.split(), stdout=subprocess.PIPE, text=True) as sampling:
        end = time.monotonic() + CLOCK_SECONDS
        while time.monotonic() < end:
            run()
        sampling.terminate()
        lines = (sampling.communicate()[0] or "").splitlines()
    return clock_text(lines)


def clock_text(lines: Sequence[str]) -> str:
    """Returns the medians of what nvidia-smi printed; the first samples are of the time before the load."""
    samples = [line.split(", ") for line in lines[len(lines) // 2 :]]
    try:
        clock, most, power, limit, heat = (median(map(float, each)) for each in zip(*samples, strict=True))
    except ValueError:
        return "The clock is unknown. "
    return f"SM clock {clock:.0f} of {most:.0f} MHz, {power:.0f} of {limit:.0f} W, {heat:.0f} °C. "


def sums_text(step_ms: Mapping[str, float], bare_ms: float, work: Work, copied: float) -> str:
    """Returns the ratios of steps to the bare sum, and the time that a copy of the counted bytes takes."""
    ratios = ", ".join(f"{name} {taken / bare_ms:.2f}" for name, taken in step_ms.items()) if bare_ms else "-"
    return (
        f"Bare sum {bare_ms:.2f} ms; step / bare sum: {ratios}. The programs launch {work.launches} times, "
        f"and move {work.moved / 1e9:.2f} GB beside products and attention, which would take "
        f"{work.moved / copied / 1e3:.2f} ms at the {copied / 1e3:.0f} GB/s of a copy. "
    )


def analysed(row: str, device: str) -> dict[str, Any]:
    """Returns the rows of the tables of a row, by table, and their note; a table that fails says why."""
    # Tiny stages were slower with fused kernels than without.
    names = tuple(PIPELINES) if row.startswith("tiny") else (OURS, UNCAPTURED)
    steps, found = Steps.of(row, device, names), dict[str, Any]()

    def keep(table: str, make: Callable[[], Any]) -> Any:
        try:
            rows, *more = made if isinstance(made := make(), tuple) else (made,)
        except Exception as error:
            traceback.print_exc()
            found[table] = [[children.failure(error)]]
            return [None]
        found[table] = rows
        return more

    copied = copy_rate(device)
    (kernels,) = keep("step", lambda: step_rows(steps))
    calls = bare_calls(steps.programs())
    (bare,) = keep("calls", lambda: bare_rows(calls, lambda call: call.microseconds(device)))
    keep("capture", lambda: capture_rows(steps))
    if kernels is not None:
        keep("generated", lambda: generated_rows(generated_times(steps, kernels[UNCAPTURED]), copied))
    found["note"] = clocks(steps.timed()[UNCAPTURED], device)
    found["note"] += inputs_text(steps.candidates[UNCAPTURED], work_of(steps.programs()))
    if kernels is not None and bare is not None:
        step_ms = {name: float(str(text).split()[0]) for name, text, *_ in found["step"]}
        found["note"] += sums_text(step_ms, bare, work_of(steps.programs()), copied)
        found["note"] += attention_text(kernels[UNCAPTURED])
    return found


def inputs_text(step: Step, work: Work) -> str:
    """Returns the bytes that copies into graphs move, beside the bytes that the programs move."""
    copied = 2 * (step.input.nbytes + step.gradient.nbytes)
    moved = copied + work.moved + work.by_libraries
    return (
        f"Before replays, inputs and output gradients are copied: {copied / 1e6:.2f} of {moved / 1e6:.2f} MB "
        f"that a captured step moves, {copied / moved:.1%}. "
    )


def attention_text(kernels: Sequence[shares.Interval]) -> str:
    """Returns the names of the kernels of attention."""
    names = {each.name for each in kernels if shares.kind_of(each.name) == shares.ATTENTION}
    return (
        f"Kernels of attention: {', '.join(f'`{name[:120]}`' for name in sorted(names))}. " if names else ""
    )


def tables_of(row: str, found: Any) -> list[Table]:
    """Returns the tables of one row, or a table that says why there are none."""
    title = ROWS[row].title
    if isinstance(found, str):
        return [Table(title, ["result"], [[found]])]
    notes = {"step": f"`{row}`. {found['note']}\n"}
    return [
        Table(f"{title}: {what}", headers, found[table], notes.get(table, ""))
        for table, (what, headers) in TABLES.items()
        if found.get(table)
    ]


BENCHMARK = RowBenchmark(
    "bench.gpu.where", "Where the time is", NOTE, ORDER, analysed, tables_of, ROW_SECONDS, "where"
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:]) else 1)
