"""Step time against peak memory of GPT blocks at nine shares of activations, beside torch.compile.

{CASE.count} GPT blocks of width {CASE.width}, 8 heads, {CASE.chunks} micro-batches of {CASE.batch} x
{CASE.length} tokens; forward and backward from a given output gradient. gpipe_fast has K = {STAGES} stages
with one thread each, or one stage with two; the others are plain loops over the micro-batches with two
threads, compiled by torch.compile(backend={CASE.backend!r}) where it says so. 0 is 'always', 1 is 'never'.
Every candidate has its own process; candidates alternate; medians of {ROUNDS} steps. Gradients are compared
with the plain loop's with one thread: ours with one thread must be equal, others may differ by
{TOLERANCE:.0e} of the largest element of their tensor. Peak memory is what a step needs beyond parameters,
input and imported modules; for the others, also beyond what compilation left.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from xml.sax.saxutils import escape

import torch
import torch._functorch.config as functorch_config
from torch import nn

from bench.compare.step import LOOP, OURS, PAUSE, ROUNDS, STAGES, Case
from bench.comparison import Comparison, Opened, Outcome, gradients, one_thread
from bench.measure import ROOT, Table, report
from bench.peers import Candidate, Forward, ProcessCandidate, Step, checkpointed, looped
from gpipe_fast import GPipe
from gpipe_fast.lower.ladder import Ladder, bytes_of
from gpipe_fast.trace.trace import trace
from gpipe_fast.trace.traceability import Untraceable

SHARES = [i / 8 for i in range(9)]
COMPILED, RECOMPUTING, BUDGET = (
    "torch.compile",
    "torch.compile, torch.utils.checkpoint",
    "torch.compile, activation_memory_budget=0.5",
)
# One stage, whose threads share the work as the loops' do: no bubble, and one stage's scratch memory.
ONE_STAGE = "one stage of gpipe_fast, checkpoint="
PEERS = [ONE_STAGE + "0", ONE_STAGE + "0.5", LOOP, COMPILED, RECOMPUTING, BUDGET]


CASE = Case(recompute=False, count=6)


def name_of(share: float) -> str:
    return f"{OURS}, checkpoint={share:g}"


NAMES = [*map(name_of, SHARES), *PEERS]


def make(number: int, name: str, case: Case) -> Candidate:
    """Builds a candidate in its process.

    Before the candidate's memory counts, ours runs a tiny step, which triggers all lazy imports; others run
    a step of the case, so that what compilation leaves does not count.
    """
    if OURS in name:
        build(name, case.tiny())()
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


def comparison(case: Case, names: Sequence[str]) -> Comparison:
    """Returns the comparison of candidates, each in a process of its own."""

    def opened(stack: ExitStack) -> Opened:
        candidates = {}
        for name in names:
            threads = 1 if name.startswith(OURS) else STAGES
            candidates[name] = ProcessCandidate(make, (name, case), threads)
            stack.callback(candidates[name].close)
        return candidates, case.reference_gradients()

    return Comparison(
        "step of GPT blocks, by share kept, and torch.compile", names, opened, ROUNDS, pause=PAUSE
    )


HEADERS = ["candidate", "ms: median [p20, p80]", "time / 'never'", "peak memory, MiB", "gradients"]


def rows(results: Mapping[str, Outcome]) -> list[list[object]]:
    """Returns one row per candidate; one whose gradients are wrong gets no time."""
    never = results[name_of(1.0)]
    return [
        [name, each.ms(), each.over(never), each.peak(), gradients(name, each)]
        for name, each in results.items()
    ]


def ladder_rows(case: Case) -> list[list[object]]:
    """Returns, for each share, the bytes that a stage saves, and the predicted time of its recompute."""
    layers = case.stages()[0]
    input = torch.empty(case.batch, case.length, case.width, requires_grad=True)
    with one_thread():
        joint = trace(list(layers), (input,), ())
        assert not isinstance(joint, Untraceable)
        ladder, whole = Ladder.of(joint), 0
    values = {node.name: node.meta.get("val") for node in joint.module.graph.nodes}
    found: list[list[object]] = []
    for share in reversed(SHARES):
        index, names = ladder.furthest(lambda name: bytes_of(values[name]), share)
        kept = sum(bytes_of(values[name]) for name in names)
        whole = kept if share == 1 else whole
        again, all_again = ladder.rungs[index].recompute, ladder.rungs[0].recompute
        found.append([share, kept / 2**20, kept / whole, again / 1e6, again / all_again])
    return found[::-1]


def plot(results: Mapping[str, Outcome]) -> str:
    """Returns a picture, as SVG, of the time of each candidate over its peak memory."""
    points = [
        (name, result.peak_bytes / 2**20, result.median / 1e3)
        for name, result in results.items()
        if result.peak_bytes is not None and result.median is not None
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
    results = comparison(CASE, NAMES).measure()
    saved = Table(
        "What a stage saves",
        ["share", "saved by a micro-batch, MiB", "of 'never'", "recompute, ms", "of 'always'"],
        ladder_rows(CASE),
        "The rungs of the ladder of a stage, with the times of its operators on one thread, each "
        "measured alone.\n",
    )
    report(globals(), HEADERS, rows(results), [saved])
    (ROOT / "docs" / "images" / "frontier.svg").write_text(plot(results))
