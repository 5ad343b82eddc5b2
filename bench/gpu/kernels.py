"""Benchmarks kernels on a GPU against eager PyTorch, Inductor and a copy of the same size.

`python -m bench kernels [family ...]` measures only some families, selected by the first word of case names.
The measurements run in a child process; if one crashes it or hangs, a new process continues with the next.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from bench.gpu import children
from bench.gpu.accuracy import Results
from bench.gpu.case import DTYPES, AccuracyCheck, KernelCase
from bench.gpu.families import all_cases
from bench.gpu.timing import Candidate, Sample, ours, samples
from bench.gpu.traffic import fused_bytes
from bench.measure import Ratio, timing, write

# Time limit in seconds.
SECONDS = float(os.environ.get("GPIPE_FAST_SECONDS", "inf"))
# Sizes in millions of elements. The largest come first, because the time on a GPU may run out.
MILLIONS = (256, 16, 1)
ROUNDS = 50
OURS, EAGER, INDUCTOR, COPY = "ours", "eager", "Inductor", "copy"
PEERS = (EAGER, INDUCTOR)
# Peers may round where PyTorch does not. A peer whose error exceeds this many times our allowed error
# computes a different function.
MAX_PEER_ERROR = 8
HEADERS = (
    "function", "dtype", "M elements", "ours, µs", "GB/s", "of copy",
    *(f"{peer} / ours" for peer in PEERS), "error",
)  # fmt: skip


@dataclass
class Measurement:
    """The measurement of one function at one size.

    Attributes:
        case: the function.
        dtype: the name of the dtype.
        millions: the size in millions of elements.
        error_ratio: the error of each candidate, as a multiple of our allowed error.
        times: microseconds of each round, by candidate.
        fault: the reason why there are no times.
    """

    case: KernelCase
    dtype: str
    millions: int
    error_ratio: dict[str, float] = field(default_factory=dict)
    times: Mapping[str, Sequence[float]] = field(default_factory=dict)
    fault: str = ""

    def row(self) -> list[object]:
        """Returns the row of the table. A wrong function gets no times and no ratios."""
        start: list[object] = [self.case.name, self.dtype, self.millions]
        off = self.error_ratio.get(OURS, float("inf"))
        if self.fault or not off <= 1:
            verdict = self.fault or f"WRONG, {off:.2g} of the allowed error"
            return [*start, *["-"] * (len(HEADERS) - len(start) - 1), verdict]
        time = timing(self.times[OURS])
        moved = fused_bytes(self.case, self.millions << 20, DTYPES[self.dtype])
        share = Ratio.of(self.times[COPY], self.times[OURS]).median
        ratios = [self._ratio(peer) for peer in PEERS]
        return [*start, str(time), f"{moved / time.median / 1e3:.0f}", f"{share:.0%}", *ratios, f"{off:.2f}"]

    def _ratio(self, peer: str) -> str:
        if peer not in self.times:
            return "-"
        if not self.error_ratio[peer] <= MAX_PEER_ERROR:
            return "different function"
        return str(Ratio.of(self.times[peer], self.times[OURS]))


def joint_graph(
    case: KernelCase, inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> Callable[..., list[Tensor]]:
    """Traces the forward and the gradients into one graph, without restrictions on a compiler's fusions."""

    def function(*tensors: Tensor) -> list[Tensor]:
        return case.unfused(tensors[: len(inputs)], tensors[len(inputs) :])

    return make_fx(function, tracing_mode="fake")(*inputs, *gradients)


def candidates(
    case: KernelCase, inputs: Sequence[Tensor], gradients: Sequence[Tensor], backend: str = "inductor"
) -> dict[str, Candidate]:
    """Returns our function and its peers, by name."""
    torch.compiler.reset()
    compiled = torch.compile(joint_graph(case, inputs, gradients), backend=backend, dynamic=False)
    return {
        OURS: ours(case, inputs, gradients),
        EAGER: Candidate(lambda: case.unfused(inputs, gradients)),
        INDUCTOR: Candidate(lambda: compiled(*inputs, *gradients)),
    }


def measure_error(candidate: Candidate, accuracy_check: AccuracyCheck, peer: bool) -> float:
    """Returns the error of a candidate's results; converts a peer's results to PyTorch's dtypes first."""
    candidate.reset()
    found: Results = candidate.run()  # type: ignore[assignment]
    if peer:
        pairs = zip(found, accuracy_check.eager, strict=False)
        found = [f if f is None or e is None else f.to(e.dtype) for f, e in pairs]
    return accuracy_check.error_ratio(found)


def copy(num_bytes: int, device: str) -> Candidate:
    """Returns a copy within a device whose reads and writes add up to ``num_bytes``."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return Candidate(lambda: target.copy_(source))


def measure(
    case: KernelCase,
    dtype: str,
    millions: int,
    device: str = "cuda",
    backend: str = "inductor",
    sample: Sample = samples,
) -> Measurement:
    """Checks our function and its peers, and times them if our results are right."""
    result = Measurement(case, dtype, millions)
    torch.manual_seed(0)
    inputs = case.inputs(millions << 20, DTYPES[dtype], device)
    gradients = case.gradients(inputs)
    accuracy_check = AccuracyCheck.of(case, inputs, gradients)
    timed = candidates(case, inputs, gradients, backend)
    for name, candidate in list(timed.items()):
        try:
            # Eager PyTorch is the baseline of the check.
            peer = name != OURS
            result.error_ratio[name] = (
                0.0 if name == EAGER else measure_error(candidate, accuracy_check, peer)
            )
        except Exception as error:
            if name == OURS:
                raise
            print(f"{case.name}, {dtype}: {name}: {type(error).__name__}: {error}", file=sys.stderr)
            del timed[name]
    del accuracy_check
    if result.error_ratio[OURS] <= 1:
        timed[COPY] = copy(fused_bytes(case, millions << 20, DTYPES[dtype]), device)
        result.times = sample(timed, ROUNDS)
    return result


def row_of(name: str) -> list[object]:
    """Measures in this process, and returns a row."""
    key = keys_of(all_cases().values())[name]
    try:
        return measure(*key).row()
    except torch.OutOfMemoryError:
        return Measurement(*key, fault="out of memory").row()


def keys_of(cases: Iterable[KernelCase]) -> dict[str, tuple[KernelCase, str, int]]:
    """Returns function, dtype and size of each measurement by its name; the largest sizes come first."""
    every = product(MILLIONS, cases, DTYPES)
    return {f"{case.name}, {dtype}, {m} M": (case, dtype, m) for m, case, dtype in every}


def select_cases(names: Sequence[str]) -> list[KernelCase]:
    """Returns the cases whose names begin with one of these words; all cases by default."""
    cases = all_cases().values()
    words = {case.name.split()[0] for case in cases}
    unknown = [name for name in names if name not in words]
    if unknown:
        raise SystemExit(f"unknown family: {', '.join(unknown)}; known families: {', '.join(sorted(words))}")
    return [case for case in cases if not names or case.name.split()[0] in names]


def main(names: Sequence[str] = ()) -> bool:
    """Measures and returns whether every function was right and timed."""
    cases = select_cases(names)
    if not torch.cuda.is_available():
        print("kernels: needs a GPU, but no GPU is visible; nothing is written", flush=True)
        return False
    keys = keys_of(cases)
    places = {name: (cases.index(c), list(DTYPES).index(d), m) for name, (c, d, m) in keys.items()}
    rows: dict[str, list[object]] = {}

    def keep(name: str, found: Any, seconds: float) -> None:
        row = rows[name] = Measurement(*keys[name], fault=found).row() if isinstance(found, str) else found
        print(*row, sep=" | ", flush=True)
        # The report is written after every row, so that results survive if the time on the GPU runs out.
        _report(names, [rows[each] for each in sorted(rows, key=lambda each: places[each])])

    not_run = children.run("bench.gpu.kernels", list(keys), SECONDS, keep)
    rest = "; no time left for the others" if not_run else ""
    timed = sum(row[3] != "-" for row in rows.values())
    print(f"{timed} of {len(keys)} measurements are right and timed{rest}", flush=True)
    return timed == len(keys)


def _report(names: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    write(
        "_".join(["kernels", *names]),
        "Kernels: the backward of a recomputed segment",
        HEADERS,
        rows,
        f"Triton {version('triton')}. Microseconds between GPU events: medians [p20, p80] of {ROUNDS} "
        "rounds in which all candidates alternate, launched without gaps, with L2 flushed before each. Bytes "
        'are counted ([traffic.md](traffic.md)); "of copy" compares with a copy of as many bytes within the '
        "GPU. Ratios are medians of paired samples of one round, with 95% confidence intervals; above 1 ours "
        "is faster. Inductor compiles forward and gradients as one graph. The error is a fraction of the "
        "allowed error: twice PyTorch's own error against float64, or one rounding; above 1 no times are "
        "given.\n",
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        children.serve(sys.argv[2:], row_of)
    else:
        sys.exit(0 if main(sys.argv[1:]) else 1)
