"""One row of the CUDA benchmark, in its own process: `python -m bench.gpu.row NAME FILE`.

Findings are written to FILE as they are made, together with the candidate that is running, so the parent
process knows which candidate crashed this one.
"""

from __future__ import annotations

import argparse
import faulthandler
import time
from collections.abc import Collection
from pathlib import Path

import torch

from bench.gpu import copies as cuda_copies
from bench.gpu.findings import Findings, synchronize_and_free
from bench.gpu.idle import idle_share, intervals
from bench.gpu.subjects import LOOP, ROWS, Row, with_small_subject
from bench.peers import Step, relative_difference
from gpipe_fast import GPipe, doctor

# Steps before the counted ones: they make plans, capture graphs and replay them.
WARM_UP = 4
PROFILED_STEPS = 2


class Measurement:
    """Measures one row.

    Args:
        row: the row.
        device: device of the stages.
        findings: receives the measurements.
        deadline: value of `time.monotonic()` after which no new round begins.
        backend: backend of torch.compile.
    """

    def __init__(
        self, row: Row, device: str, findings: Findings, deadline: float, backend: str = "inductor"
    ) -> None:
        self.row, self.device, self.findings = row, device, findings
        self.deadline, self.backend = deadline, backend
        self.steps: dict[str, Step] = {}
        self._on_gpu = torch.device(device).type == "cuda"

    def run(self, without: Collection[str] = ()) -> None:
        names = [name for name in self.row.full.candidates() if name not in without]
        self.measure_errors(names)
        names = [name for name in names if "failed" not in self.findings.candidates[name]]
        synchronize_and_free()
        if self._on_gpu:
            torch._C._cuda_clearCublasWorkspaces()  # the workspaces that a step allocates count as its memory
        data = self.row.full.data(self.device)
        for name in names:
            self.findings.set_running(name)
            try:
                self.build(name, data)
            except Exception as error:
                self.steps.pop(name, None)
                self.findings.fail(name, error)
        self.times()
        if time.monotonic() < self.deadline:
            self.idle()
        else:
            self.findings.remarks.append("no time left for profiles")
        self.findings.set_running(None)

    def measure_errors(self, names: Collection[str]) -> None:
        """Records each candidate's gradient error against float64, for the first and for a later step."""
        small = self.row.small
        data = small.data(self.device)
        exact, plain = small.exact(self.device, data), small.step(LOOP, self.device, data)
        exact_gradients, wanted = _gradients(exact), _gradients(plain)
        for name in names:
            self.findings.set_running(name)
            try:
                step = small.step(name, self.device, data, self.backend)
                found = [_gradients(step) for _ in range(1 if name == LOOP else WARM_UP)]
                self.findings.record(
                    name,
                    error=max(relative_difference(each, exact_gradients) for each in (found[0], found[-1])),
                    equal=relative_difference(found[0], wanted)
                    == relative_difference(found[-1], wanted)
                    == 0,
                )
            except Exception as error:
                self.findings.fail(name, error)

    def build(self, name: str, data: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Builds a candidate and records the memory that its step needs beyond parameters and input."""
        begin = time.monotonic()
        step = self.row.full.step(name, self.device, data, self.backend)
        synchronize_and_free()
        before = self._memory()
        for _ in range(WARM_UP):
            step()
        synchronize_and_free()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
            allocated, reserved = (peak - was for peak, was in zip(peaks, before, strict=True))
            self.findings.record(name, peak_bytes=allocated, reserved_bytes=reserved)
        self.findings.record(name, built_seconds=time.monotonic() - begin)
        self.steps[name] = step
        if isinstance(step.forward, GPipe):
            self.findings.record(name, doctor=doctor(step.forward))

    def _memory(self) -> tuple[int, int]:
        if not self._on_gpu:
            return 0, 0
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def times(self) -> None:
        """Records the time until a step's call returns and until the device has finished (µs).

        The candidates alternate.
        """
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in self.steps}
        for round_index in range(self.row.rounds):
            if round_index >= 2 and time.monotonic() > self.deadline:
                self.findings.remarks.append(f"time limit reached after {round_index} rounds")
                break
            for name, step in self.steps.items():
                self.findings.set_running(name)
                found[name].append(self._sample(step))
            for name, samples in found.items():
                host, step_times = zip(*samples, strict=True)
                self.findings.record(name, host_us=list(host), step_us=list(step_times))

    def _sample(self, step: Step) -> tuple[float, float]:
        begin = time.perf_counter()
        step()
        returned = time.perf_counter()
        if self._on_gpu:
            torch.cuda.synchronize()
        return (returned - begin) * 1e6, (time.perf_counter() - begin) * 1e6

    def idle(self) -> None:
        """Records the device's idle share during consecutive steps.

        The first profile of the process profiles a dummy operator and is discarded.
        """
        intervals(lambda: torch.ones((), device=self.device), self.device)
        for name, step in self.steps.items():
            self.findings.set_running(name)

            def run_steps(step: Step = step) -> None:
                for _ in range(PROFILED_STEPS):
                    step()

            found = intervals(run_steps, self.device)
            self.findings.record(name, idle=idle_share(found), intervals=len(found) // PROFILED_STEPS)


def _gradients(step: Step) -> list[torch.Tensor]:
    step()
    return [gradient.double() for gradient in step.gradients()]


def run(
    name: str, path: Path, device: str, seconds: float, small: bool = False, without: Collection[str] = ()
) -> None:
    """Measures a row.

    Args:
        name: a key of `ROWS`, or 'copies'.
        path: file of the findings.
        device: device of the stages.
        seconds: time limit.
        small: whether to measure the small models and compile nothing.
        without: excluded candidates.
    """
    findings, deadline = Findings(path), time.monotonic() + seconds
    if name == cuda_copies.NAME:
        cuda_copies.measure(findings, device, small, without)
        return
    row = with_small_subject(ROWS[name]) if small else ROWS[name]
    # 20% of the time is reserved for the profiles after the rounds.
    backend = "eager" if small else "inductor"
    Measurement(row, device, findings, deadline - 0.2 * seconds, backend).run(without)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.row", description=__doc__)
    parser.add_argument("name", choices=[*ROWS, cuda_copies.NAME])
    parser.add_argument("path", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--without", action="append", default=[])
    wanted = parser.parse_args()
    # Prints a traceback of a hanging process before the parent kills it.
    faulthandler.dump_traceback_later(1.15 * wanted.seconds)
    run(**vars(wanted))


if __name__ == "__main__":
    main()
