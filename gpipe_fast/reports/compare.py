"""A comparison of a pipeline's step with those of the same layers without it, plain and compiled."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast.arguments import enough_chunks
from gpipe_fast.devices import available_processors
from gpipe_fast.layers.structure import Inputs, call_unpacked, flatten
from gpipe_fast.reports.reporting import Reporting
from gpipe_fast.reports.steps import backward_of_sum, unchanged
from gpipe_fast.reports.tables import Printed, Table, failure, ms, others_running, size

_ROUNDS = 5
PIPELINE = "the pipeline"


@dataclass(frozen=True)
class Compared:
    """The steps of one candidate.

    Attributes:
        name: what runs.
        seconds: of each recorded step.
        peak_bytes: what a step adds to the memory at most: of the process, or of the GPU.
        difference: the largest difference of a gradient from that of the plain layers, relative to the
            largest element of that gradient.
        failure: the error of a candidate that failed; else empty.
    """

    name: str
    seconds: tuple[float, ...] = ()
    peak_bytes: int = 0
    difference: float = 0.0
    failure: str = ""


@dataclass(frozen=True)
class Comparison(Printed):
    """Steps of a pipeline beside those of its plain layers. ``print`` shows a table.

    Attributes:
        candidates: the pipeline first.
        load: the average number of threads that wanted a processor, over a minute, before the comparison.
        processors: how many there are.
    """

    candidates: tuple[Compared, ...]
    load: float
    processors: int

    def _parts(self) -> list[str | Table]:
        rows = []
        for own in self.candidates:
            if own.failure:
                rows.append([own.name, own.failure, "", ""])
                continue
            times = f"{ms(median(own.seconds))} [{ms(min(own.seconds))}, {ms(max(own.seconds))}]"
            rows.append([own.name, times, size(own.peak_bytes), f"{own.difference:.1e}"])
        first, *others = (own for own in self.candidates if not own.failure)
        fastest = min(others, key=lambda own: median(own.seconds), default=first)
        ratio = median(fastest.seconds) / median(first.seconds)
        busy = others_running(self.load, self.processors)
        lines: list[str | Table] = [busy] if busy else []
        headers = ["step", "ms: median [fastest, slowest]", "peak memory", "difference of gradients"]
        lines.append(Table("", headers, rows, headers[1:2]))
        lines.append(f"{first.name} takes {1 / ratio:.2f} times as long as {fastest.name}.")
        return lines


def compare(model: Any, x: Any, target: Any = None, loss_fn: Any = None, rounds: int = _ROUNDS) -> Comparison:
    """Runs steps of a pipeline and of its plain layers in turn; restores buffers and gradients.

    Args:
        model: a `GPipe` whose stages are on one device, or a model of `GPipe.from_model` that returns a loss.
        x: as for the command ``gpipe-fast report``.
        target: likewise.
        loss_fn: likewise; a mean over samples, or None for the sum of the output.
        rounds: the number of recorded steps of each candidate.

    Raises:
        ValueError: the stages are on several devices.
    """
    is_sequence = isinstance(model, Reporting)
    devices = (model if is_sequence else model.pipeline).devices
    if len({*devices}) > 1:
        raise ValueError(
            f"compare runs the layers on one device, got stages on {', '.join(map(str, devices))}; pass "
            "one device for all stages, such as devices=['cuda:0', 'cuda:0']"
        )
    layers = nn.Sequential(*model) if is_sequence else model.plain()
    compiled = torch.compile(layers)
    inputs = Inputs.of((), x) if isinstance(x, dict) else Inputs.of((x,), {})
    goal, structure = flatten(target) if target is not None else ([], None)

    def parts(number: int) -> Iterator[tuple[Any, Any, float]]:
        split = inputs.dims.split(inputs.tensors, number)
        goals = zip(*(y.chunk(number) for y in goal), strict=True) if structure else [()] * len(split)
        for tensors, own in zip(split, goals, strict=True):
            share = len(tensors[0]) / inputs.batch_size
            yield inputs.structure.build(tensors), structure.build(own) if structure else None, share

    def steps(run: Callable[..., Any], number: int) -> Callable[[], None]:
        def step() -> None:
            for value, own, share in parts(number):
                output = call_unpacked(run, value)
                if loss_fn is not None:
                    (share * loss_fn(output, own)).backward()
                elif isinstance(x, dict):
                    (share * (output.loss if hasattr(output, "loss") else output[0])).backward()
                else:
                    backward_of_sum(output)

        return step

    def pipeline() -> None:
        if loss_fn is not None:
            model.step(x, target=target, loss_fn=loss_fn)
        elif isinstance(x, dict):
            model.step(**x)
        else:
            backward_of_sum(model(x))

    chunks = enough_chunks(len(devices), inputs.batch_size) if model.chunks == "auto" else model.chunks
    number = len(inputs.dims.split(inputs.tensors, chunks))
    candidates = {PIPELINE: pipeline, "the plain layers": steps(layers, 1)}
    candidates[f"the plain layers, {number} micro-batches"] = steps(layers, number)
    candidates["torch.compile"] = steps(compiled, 1)
    candidates[f"torch.compile, {number} micro-batches"] = steps(compiled, number)
    load = os.getloadavg()[0]
    with unchanged(model):
        found = tuple(_measured(candidates, list(layers.parameters()), devices[0], rounds))
    return Comparison(found, load, available_processors())


def _measured(
    candidates: Mapping[str, Callable[[], None]],
    parameters: Sequence[nn.Parameter],
    device: torch.device,
    rounds: int,
) -> Iterator[Compared]:
    gradients: dict[str, list[Tensor | None]] = {}
    failures: dict[str, str] = {}
    peaks: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in candidates}

    def run(name: str) -> float:
        for parameter in parameters:
            parameter.grad = None
        torch.manual_seed(0)
        begun = time.perf_counter()
        candidates[name]()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun

    for name in candidates:
        try:
            for _ in range(3):  # the first three calls prepare the others
                run(name)
            with _peak(device) as peak:
                run(name)
            peaks[name] = peak[0]
        except Exception as error:  # such as of the compiler, or of a layer that takes no micro-batches
            failures[name] = failure(error)
            if name == PIPELINE:
                raise
        gradients[name] = [None if p.grad is None else p.grad.clone() for p in parameters]
    for number in range(rounds + 1):  # the first one is not recorded: a compiler has touched the layers
        for name in (name for name in candidates if name not in failures):
            duration = run(name)
            seconds[name] += [duration] if number else []
    exact = gradients["the plain layers"]
    for name in candidates:
        pairs = [
            (a, b) for a, b in zip(gradients[name], exact, strict=True) if a is not None and b is not None
        ]
        found = [float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs if a.numel()]
        yield Compared(
            name, tuple(seconds[name]), peaks.get(name, 0), max(found, default=0.0), failures.get(name, "")
        )


@contextlib.contextmanager
def _peak(device: torch.device) -> Iterator[list[int]]:
    """Yields a list that after the block has the bytes that it has added to the memory at most."""
    found: list[int] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found.append(torch.cuda.max_memory_allocated(device) - before)
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what is free already would not count as new
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _resident("VmRSS")
    yield found
    found.append(max(0, _resident("VmHWM") - before))


def _resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 0 if found is None else 1024 * int(found[1])
