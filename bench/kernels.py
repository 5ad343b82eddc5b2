"""Kernels on a GPU against eager PyTorch, Inductor, Liger-Kernel and a copy of as many bytes.

`python -m bench.kernels [family ...]` measures some families alone, by the words that their names begin with.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from bench import liger
from bench.accuracy import Results
from bench.case import DTYPES, Case, Judge
from bench.families import all_cases
from bench.gpu import Candidate, Sample, on_copies, ours, samples
from bench.measure import Ratio, report, timing
from bench.traffic import fused_bytes

# In this order: time on a GPU may run out.
MILLIONS = (256, 16, 1)
ROUNDS = 50
OURS, EAGER, INDUCTOR, LIGER, COPY = "ours", "eager", "Inductor", "Liger-Kernel", "copy"
PEERS = (EAGER, INDUCTOR, LIGER)
# Peers round where PyTorch does not; what is off by more of our allowances is another function.
SAME_FUNCTION = 8
HEADERS = (
    "function", "dtype", "M elements", "ours, µs", "GB/s", "of copy",
    *(f"{peer} / ours" for peer in PEERS), "error",
)  # fmt: skip


@dataclass
class Measured:
    """One function at one size.

    Attributes:
        case: the function.
        dtype: its name.
        millions: of elements.
        excess: the error of ours and its peers, as a share of what ours is allowed.
        times: microseconds of each round, by candidate.
        fault: why there are none.
    """

    case: Case
    dtype: str
    millions: int
    excess: dict[str, float] = field(default_factory=dict)
    times: Mapping[str, Sequence[float]] = field(default_factory=dict)
    fault: str = ""

    def row(self) -> list[object]:
        """Of the table; what is wrong has no times, and gets no ratio."""
        start: list[object] = [self.case.name, self.dtype, self.millions]
        off = self.excess.get(OURS, float("inf"))
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
        if not self.excess[peer] <= SAME_FUNCTION:
            return "another function"
        return str(Ratio.of(self.times[peer], self.times[OURS]))


def joint(case: Case, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Callable[..., list[Tensor]]:
    """The forward and the gradients as one graph, which a compiler may fuse as it likes."""

    def function(*tensors: Tensor) -> list[Tensor]:
        return case.unfused(tensors[: len(inputs)], tensors[len(inputs) :])

    return make_fx(function, tracing_mode="fake")(*inputs, *gradients)


def candidates(
    case: Case, inputs: Sequence[Tensor], gradients: Sequence[Tensor], backend: str = "inductor"
) -> dict[str, Candidate]:
    """Ours and its peers."""
    torch.compiler.reset()
    compiled = torch.compile(joint(case, inputs, gradients), backend=backend, dynamic=False)
    found = {
        OURS: ours(case, inputs, gradients),
        EAGER: Candidate(lambda: case.unfused(inputs, gradients)),
        INDUCTOR: Candidate(lambda: compiled(*inputs, *gradients)),
    }
    function = case.liger
    if function is not None and liger.available():
        found[LIGER] = on_copies(lambda i, g: case.unfused(i, g, function), inputs, gradients)
    return found


def judged(candidate: Candidate, judge: Judge, peer: bool) -> float:
    """The error of a candidate's results; a peer's may have other dtypes."""
    candidate.reset()
    found: Results = candidate.run()  # type: ignore[assignment]
    if peer:
        pairs = zip(found, judge.eager, strict=False)
        found = [f if f is None or e is None else f.to(e.dtype) for f, e in pairs]
    return judge.excess(found)


def copy(num_bytes: int, device: str) -> Candidate:
    """A copy within a device that reads and writes so many bytes together."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return Candidate(lambda: target.copy_(source))


def measure(
    case: Case,
    dtype: str,
    millions: int,
    device: str = "cuda",
    backend: str = "inductor",
    sample: Sample = samples,
) -> Measured:
    """Checks ours and its peers; times all of them only if ours computes the right thing."""
    result = Measured(case, dtype, millions)
    torch.manual_seed(0)
    inputs = case.inputs(millions << 20, DTYPES[dtype], device)
    gradients = case.gradients(inputs)
    judge = Judge.of(case, inputs, gradients)
    timed = candidates(case, inputs, gradients, backend)
    for name, candidate in list(timed.items()):
        try:
            # Eager is what the others are judged by; where it draws random numbers none of its own is right.
            same = name == EAGER or (name == INDUCTOR and case.exact is not None)
            result.excess[name] = 0.0 if same else judged(candidate, judge, peer=name != OURS)
        except Exception as error:
            if name == OURS:
                raise
            print(f"{case.name}, {dtype}: {name}: {type(error).__name__}: {error}", file=sys.stderr)
            del timed[name]
    del judge
    if result.excess[OURS] <= 1:
        timed[COPY] = copy(fused_bytes(case, millions << 20, DTYPES[dtype]), device)
        result.times = sample(timed, ROUNDS)
    return result


def attempt(case: Case, dtype: str, millions: int) -> Measured:
    """The same; a GPU may have too little memory."""
    try:
        return measure(case, dtype, millions)
    except torch.OutOfMemoryError:
        return Measured(case, dtype, millions, fault="out of memory")
    finally:
        torch.cuda.empty_cache()


def chosen(names: Sequence[str]) -> list[Case]:
    """The cases of some families, by the words that their names begin with; all by default."""
    cases = all_cases().values()
    words = {case.name.split()[0] for case in cases}
    unknown = [name for name in names if name not in words]
    if unknown:
        raise SystemExit(f"no family is called {', '.join(unknown)}; there are {', '.join(sorted(words))}")
    return [case for case in cases if not names or case.name.split()[0] in names]


def main(names: Sequence[str] = ()) -> None:
    cases = chosen(names)
    if not torch.cuda.is_available():
        print("kernels: needs a GPU, and none is visible; nothing is written", flush=True)
        return
    rows: dict[tuple[int, int, int], list[object]] = {}
    each = product(MILLIONS, enumerate(cases), enumerate(DTYPES))
    for millions, (place, case), (position, dtype) in each:
        row = rows[place, position, millions] = attempt(case, dtype, millions).row()
        print(*row, sep=" | ", flush=True)
        # Again after each: what was measured is kept if the time on the GPU runs out.
        _report(names, [rows[key] for key in sorted(rows)], printed=False)
    _report(names, [rows[key] for key in sorted(rows)], printed=True)


def _report(names: Sequence[str], rows: Sequence[Sequence[object]], printed: bool) -> None:
    found = f"Triton {_version('triton')}, Liger-Kernel {_version('liger-kernel')}"
    report(
        "_".join(["kernels", *names]),
        "Kernels: the backward of a recomputed segment",
        HEADERS,
        rows,
        f"{found}. Microseconds of the GPU, by its events: medians [p20, p80] of {ROUNDS} rounds in which "
        "all candidates take turns, launched without gaps, with L2 flushed before each. Bytes are counted "
        "([traffic.md](traffic.md)); a copy within the GPU of as many is timed beside. Ratios are in pairs "
        "of one round: the median, with its 95% confidence interval; above 1 ours is faster. Inductor "
        "compiles forward and gradients as one graph. The error is a share of what is allowed: twice "
        "PyTorch's own against float64, or one rounding; without that there are no times.\n",
        printed=printed,
    )


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "is not there"


if __name__ == "__main__":
    main(sys.argv[1:])
