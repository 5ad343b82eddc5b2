"""Step time against peak memory of GPT blocks at nine shares of activations, beside torch.compile."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from xml.sax.saxutils import escape

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn

from bench.compare.step import Result
from bench.measure import ROOT, Ratio, Table, report, samples, timing
from bench.models.gpt import blocks
from bench.peers import (
    TOLERANCE,
    Candidate,
    Forward,
    ProcessCandidate,
    Step,
    checkpointed,
    describe_difference,
    gradients_agree,
    looped,
    relative_difference,
)
from gpipe_fast import GPipe
from gpipe_fast.lower.ladder import Ladder, bytes_of
from gpipe_fast.trace.trace import trace
from gpipe_fast.trace.traceability import Untraceable

STAGES, ROUNDS, PAUSE = 2, 15, 0.05
SHARES = [i / 8 for i in range(9)]
OURS, LOOP = "gpipe_fast", "plain loop"
COMPILED, RECOMPUTING, BUDGET = (
    "torch.compile",
    "torch.compile, torch.utils.checkpoint",
    "torch.compile, activation_memory_budget=0.5",
)
# One stage, whose threads share the work as the loops' do: no bubble, and one stage's scratch memory.
ONE_STAGE = "one stage of gpipe_fast, checkpoint="
PEERS = [ONE_STAGE + "0", ONE_STAGE + "0.5", LOOP, COMPILED, RECOMPUTING, BUDGET]


@dataclass(frozen=True)
class Case:
    """A training step of GPT blocks with 8 heads in two stages.

    Attributes:
        chunks: the number of micro-batches.
        batch: the number of sequences in a micro-batch.
        length: the length of each sequence.
        width: the width of the blocks.
        count: the number of blocks.
        backend: the backend of torch.compile.
    """

    chunks: int = 8
    batch: int = 2
    length: int = 128
    width: int = 256
    count: int = 6
    backend: str = "inductor"

    def stages(self) -> list[nn.Sequential]:
        """Returns the stages; their parameters are the same in every process."""
        torch.manual_seed(0)
        layers, size = blocks(self.count, self.width), self.count // STAGES
        return [nn.Sequential(*layers[i * size : (i + 1) * size]) for i in range(STAGES)]

    def data(self) -> tuple[Tensor, Tensor]:
        """Returns the mini-batch and the gradient of its output."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.batch * self.chunks, self.length, self.width)
        input, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
        return input, gradient


@dataclass
class Timed(Result):
    """The measurements of one candidate.

    Attributes:
        times: the microseconds of each round; none if the gradients are wrong.
    """

    times: Sequence[float] = field(default_factory=list)


def name_of(share: float) -> str:
    return f"{OURS}, checkpoint={share:g}"


def make(number: int, name: str, case: Case) -> Candidate:
    """Builds a candidate in its process.

    Before the candidate's memory counts, ours runs a tiny step, which triggers all lazy imports; others run
    a step of the case, so that what compilation leaves does not count.
    """
    if OURS in name:
        build(name, replace(case, chunks=2, batch=1, length=8, width=8, count=STAGES))()
        return build(name, case)
    step = build(name, case)
    step()
    for parameter in step.parameters:
        parameter.grad = None
    gc.collect()
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    return step


def build(name: str, case: Case) -> Step:
    stages, (input, gradient) = case.stages(), case.data()
    model = nn.Sequential(*(layer for stage in stages for layer in stage))
    forward: Forward
    if OURS in name:
        share = float(name.partition("=")[2])
        balance = [len(model)] if name.startswith(ONE_STAGE) else [len(stage) for stage in stages]
        pipe = GPipe(model, balance, devices=["cpu"] * len(balance), chunks=case.chunks, checkpoint=share)
        pipe.threads_per_stage = STAGES // len(balance)
        forward = pipe
    elif name == LOOP:
        forward = looped(model, case.chunks)
    else:
        if name == BUDGET:
            functorch_config.activation_memory_budget = 0.5
        whole = checkpointed(stages) if name == RECOMPUTING else model
        forward = looped(torch.compile(whole, backend=case.backend, dynamic=False), case.chunks)
    return Step(model.parameters(), forward, input, gradient)


def reference_gradients(case: Case) -> list[Tensor]:
    """Returns the gradients of the plain loop with one thread."""
    step = build(LOOP, case)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    step()
    torch.set_num_threads(before)
    return step.gradients()


def measure(case: Case, names: Sequence[str], rounds: int) -> dict[str, Timed]:
    """Compares the gradients of a step, then times the candidates whose gradients are right, by turns."""
    with contextlib.ExitStack() as stack:
        wanted = reference_gradients(case)
        candidates: dict[str, ProcessCandidate] = {}
        results: dict[str, Timed] = {}
        for name in names:
            threads = 1 if name.startswith(OURS) else STAGES
            candidates[name] = ProcessCandidate(make, (name, case), threads)
            stack.callback(candidates[name].close)
        for name, candidate in candidates.items():
            candidate()
            results[name] = Timed(relative_difference(candidate.gradients(), wanted))
            results[name].peak_bytes = candidate.peak_bytes()
        correct = {n: c for n, c in candidates.items() if gradients_agree(n, results[n].off)}
        for name, times in samples(correct, rounds, pause=PAUSE).items():
            results[name].times, results[name].timing = times, timing(times)
    return results


HEADERS = [
    "candidate",
    "ms: median [p20, p80]",
    "time / 'never': median of pairs [95%]",
    "peak memory, MiB",
    "gradients",
]


def rows(results: Mapping[str, Timed]) -> list[list[object]]:
    """Returns one row per candidate; one whose gradients are wrong gets no time."""
    never = results[name_of(1.0)].times
    return [
        [
            name,
            result.timing.ms() if result.timing else "-",
            str(Ratio.of(result.times, never)) if result.times and never else "-",
            "-" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:.0f}",
            describe_difference(name, result.off),
        ]
        for name, result in results.items()
    ]


def ladder_rows(case: Case) -> list[list[object]]:
    """Returns, for each share, the bytes that a stage saves, and the predicted time of its recompute."""
    layers = case.stages()[0]
    input = torch.empty(case.batch, case.length, case.width, requires_grad=True)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    joint = trace(list(layers), (input,), ())
    assert not isinstance(joint, Untraceable)
    ladder, whole = Ladder.of(joint), 0
    torch.set_num_threads(before)
    values = {node.name: node.meta.get("val") for node in joint.module.graph.nodes}
    found: list[list[object]] = []
    for share in reversed(SHARES):
        index, names = ladder.furthest(lambda name: bytes_of(values[name]), share)
        kept = sum(bytes_of(values[name]) for name in names)
        whole = kept if share == 1 else whole
        again, all_again = ladder.rungs[index].recompute, ladder.rungs[0].recompute
        found.append([share, kept / 2**20, kept / whole, again / 1e6, again / all_again])
    return found[::-1]


def plot(results: Mapping[str, Result]) -> str:
    """Returns a picture, as SVG, of the time of each candidate over its peak memory."""
    points = [
        (name, result.peak_bytes / 2**20, result.timing.median / 1e3)
        for name, result in results.items()
        if result.peak_bytes is not None and result.timing is not None
    ]
    width, height, margin = 760, 420, 60
    most = [1.1 * max(each) for each in list(zip(*points, strict=True))[1:]]

    def x(size: float) -> float:
        return float(margin + size / most[0] * (width - 2 * margin))

    def y(time: float) -> float:
        return float(height - margin - time / most[1] * (height - 2 * margin))

    ours = " ".join(f"{x(size):.1f},{y(time):.1f}" for n, size, time in points if n.startswith(OURS))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<path d="M{margin},{margin} V{height - margin} H{width - margin}" fill="none" stroke="#aaaaaa"/>',
        f'<text x="{margin}" y="{margin - 12}">ms of a step</text>',
        f'<text x="{width - margin}" y="{height - 20}" text-anchor="end">peak memory, MiB</text>',
        f'<polyline points="{ours}" fill="none" stroke="#f7a650"/>',
    ]
    for number in range(0, int(most[0]) + 1, 50):
        parts.append(f'<text x="{x(number):.1f}" y="{height - margin + 16}">{number}</text>')
    for number in range(0, int(most[1]) + 1, 200):
        parts.append(f'<text x="{margin - 6}" y="{y(number):.1f}" text-anchor="end">{number}</text>')
    letters = dict(zip((name for name, *_ in points if not name.startswith(OURS)), "abcdefgh", strict=False))
    for name, size, time in points:
        colour = "#f7a650" if OURS in name else "#4c78a8"
        parts.append(f'<circle cx="{x(size):.1f}" cy="{y(time):.1f}" r="4" fill="{colour}"/>')
        label, shift = (
            letters.get(name, name.removeprefix(f"{OURS}, checkpoint=")),
            -8 if name in letters else 18,
        )
        parts.append(f'<text x="{x(size) - 3:.1f}" y="{y(time) + shift:.1f}">{label}</text>')
    legend = ["with a line: two stages of gpipe_fast, and their checkpoint="]
    legend += [f"{letter}: {name}" for name, letter in letters.items()]
    for row, text in enumerate(legend):
        parts.append(f'<text x="{margin + 20}" y="{height - margin - 120 + 16 * row}">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    case = Case()
    results = measure(case, [*map(name_of, SHARES), *PEERS], ROUNDS)
    report(
        "frontier",
        "Step time against peak memory",
        HEADERS,
        rows(results),
        f"{case.count} GPT blocks of width {case.width}, 8 heads, {case.chunks} micro-batches of "
        f"{case.batch} x {case.length} tokens; forward and backward from a given output gradient. gpipe_fast "
        f"has K = {STAGES} stages with one thread each, or one stage with two; the others are plain loops "
        "over the micro-batches with two threads, compiled by torch.compile("
        f"backend={case.backend!r}) where it says so. 0 is 'always', 1 is 'never'. "
        f"Every candidate has its own process; candidates alternate; medians of {ROUNDS} steps. Gradients "
        "are compared with the plain loop's with one thread: ours with one thread must be equal, others may "
        f"differ by {TOLERANCE:.0e} of the largest element of their tensor. Peak memory is what a step needs "
        "beyond parameters, input and imported modules; for the others, also beyond what compilation left.\n",
        [
            Table(
                "What a stage saves",
                ["share", "saved by a micro-batch, MiB", "of 'never'", "recompute, ms", "of 'always'"],
                ladder_rows(case),
                "The rungs of the ladder of a stage, with the times of its operators on one thread, each "
                "measured alone.\n",
            )
        ],
    )
    (ROOT / "docs" / "images" / "frontier.svg").write_text(plot(results))


if __name__ == "__main__":
    main()
