"""Step time and peak memory of GPT blocks at nine shares of activations, beside torch.compile.

{CASE.count} GPT blocks of width {CASE.width}, 8 heads, {CASE.chunks} micro-batches of {CASE.batch} x
{CASE.length} tokens; forward and backward from a given output gradient. gpipe_fast has K = 2 stages
with one thread each; the others are plain loops over the micro-batches with two threads, compiled by
torch.compile(backend={CASE.backend!r}) where it says so. 0 is 'always', 1 is 'never'. Every candidate has its
own process; candidates alternate. Gradients are compared with the plain loop's with one thread: ours must be
equal, others may differ by {TOLERANCE:.0e} of the largest element of their tensor. Peak memory is what a step
needs beyond parameters, input and imported modules; for the others, also beyond what compilation left.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench.compare.step import BUDGET, COMPILED, LOOP, OURS, RECOMPUTING, Case, comparison
from bench.comparison import Outcome, report_comparisons
from bench.measure import ROOT

CASE = Case(recompute=False)
SHARES = [i / 8 for i in range(8, -1, -1)]
NAMES = [*(f"{OURS}, checkpoint={share:g}" for share in SHARES), LOOP, COMPILED, RECOMPUTING, BUDGET]
COMPARISONS = [comparison(CASE, NAMES, "step of GPT blocks, by share kept, and torch.compile")]
WIDTH, HEIGHT, MARGIN = 760, 420, 60


def plot(results: Mapping[str, Outcome]) -> str:
    """Returns a picture, as SVG, of the time of each candidate over its peak memory."""
    points = [
        (name, result.peak_bytes / 2**20, result.median / 1e3)
        for name, result in results.items()
        if result.peak_bytes is not None and result.median is not None
    ]
    largest, slowest = (1.1 * max(each) for each in list(zip(*points, strict=True))[1:])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="11"><rect width="100%" height="100%" fill="#ffffff"/>',
        f'<path d="M{MARGIN},{MARGIN} V{HEIGHT - MARGIN} H{WIDTH - MARGIN}" fill="none" stroke="#aaaaaa"/>',
        f'<text x="{MARGIN}" y="{MARGIN - 12}">ms of a step, at most {slowest:.0f}</text>',
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 20}" text-anchor="end">'
        f"peak memory, at most {largest:.0f} MiB</text>",
    ]
    for name, size, time in points:
        x = MARGIN + size / largest * (WIDTH - 2 * MARGIN)
        y = HEIGHT - MARGIN - time / slowest * (HEIGHT - 2 * MARGIN)
        is_ours = name.startswith(OURS)
        label, shift = (name.rpartition("=")[2], 18) if is_ours else (name, -8)
        colour = "#f7a650" if is_ours else "#4c78a8"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + shift:.1f}" text-anchor="middle">{label}</text>')
    legend = "numbers: two stages of gpipe_fast, and their checkpoint="
    parts.append(f'<text x="{MARGIN + 20}" y="{HEIGHT - MARGIN - 20}">{legend}</text></svg>\n')
    return "\n".join(parts)


def main() -> None:
    (results,) = report_comparisons(globals())
    (ROOT / "docs" / "images" / "frontier.svg").write_text(plot(results))
