"""Which operators a GPU would get from eager autograd and from gpipe_fast: the differences, each explained.

`python -m tests.equivalence.cuda_operators_table` writes the table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.equivalence.cuda_operators import ALL, MODES, Verdict
from tests.fake_cuda import process
from tests.fake_cuda.build import build

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "cuda_operators.md"
PROGRAM = Path(__file__).with_name("cuda_operators.py")


def run(configurations: Sequence[tuple[str, str]], libraries: tuple[Path, Path]) -> list[Verdict]:
    """Verdicts of configurations, each a mode and a name, from processes that see GPUs."""
    words = [f"{mode}/{name}" for mode, name in configurations]
    parts = [words[begin : begin + 100] for begin in range(0, len(words), 100)]
    lines = [line for part in parts for line in process.run(str(PROGRAM), libraries, *part)]
    return [Verdict(**json.loads(line)) for line in lines if line.startswith("{")]


@dataclass(frozen=True)
class Explanation:
    """Why operators differ, and no bit does.

    Attributes:
        lines: of the diff.
        text: why.
        modes: where it holds; empty for all.
        names: a pattern of the configurations for which it holds.
    """

    lines: frozenset[str]
    text: str
    modes: frozenset[str] = frozenset()
    names: str = ""

    def holds(self, verdict: Verdict, line: str) -> bool:
        """Whether it explains a line of a diff."""
        here = not self.modes or verdict.mode in self.modes
        return here and line in self.lines and re.search(self.names, verdict.name) is not None


_BOTH = ("forward", "backward")
_WITH_BATCH_NORM = "BatchNorm|InstanceNorm|batch norm|instance norm|^(paper|torchvision):"
EXPLANATIONS = (
    Explanation(
        frozenset(f"{d}: + {kind}_scatter" for d in _BOTH for kind in ("slice", "select", "as_strided")),
        "A write into a view is, in a graph that changes nothing in place, a copy of the whole with that "
        "part replaced: elements are moved, and none is computed.",
    ),
    Explanation(
        frozenset({"forward: + _to_copy"}),
        "For running statistics of 16 bits PyTorch's fake batch norm returns 32, which the trace casts back. "
        "The kernels return 16, and the cast is a copy.",
        modes=frozenset({"bf16", "fp16"}),
        names=_WITH_BATCH_NORM,
    ),
    Explanation(
        frozenset({"forward: + _to_copy"}),
        "An fp32 tensor that is added in place to a view in 16 bits: the sum is computed in fp32 and rounded "
        "when it is stored; without writing in place that is a sum and a cast, which round the same.",
        modes=frozenset({"autocast to bf16", "autocast to fp16"}),
        names="MViT",
    ),
    Explanation(
        frozenset({"backward: - clone"}),
        "Eager makes the gradient contiguous before it calls `cudnn_batch_norm_backward`; "
        "`batch_norm_backward`, which the trace calls, has that done inside.",
        names=_WITH_BATCH_NORM,
    ),
    Explanation(
        frozenset({"backward: - add"}),
        "Both uses of a tied parameter are added to its accumulator, in autograd's order, not to each other.",
        names="tied parameters",
    ),
    Explanation(
        frozenset({"backward: - addmm", "backward: - gelu", "backward: - _to_copy"}),
        "Eager recomputes in the backward what `torch.utils.checkpoint` dropped. The trace has it once, and "
        "recomputes it or not as GPipe's own policy says.",
        names="nested checkpoint",
    ),
    Explanation(
        frozenset({"programs: add x-1"}),
        "The last sum of a gradient's terms is left to the accumulator.",
        names="spectral norm",
    ),
)


def explained(verdict: Verdict) -> dict[str, str | None]:
    """The lines in which a configuration differs, and why; None where no reason is known."""
    lines = (*verdict.differs, *(f"programs: {line}" for line in verdict.lowered))
    return {line: next((e.text for e in EXPLANATIONS if e.holds(verdict, line)), None) for line in lines}


def counts(verdicts: Sequence[Verdict]) -> list[tuple[str, int, int, int, int]]:
    """Of each mode, and of all: configurations, those equal, those that differ, those that are not traced."""
    found = []
    for mode in (*MODES, "all"):
        own = [v for v in verdicts if mode in (v.mode, "all")]
        untraced = sum(v.reason is not None for v in own)
        differ = sum(bool(explained(v)) for v in own)
        found.append((mode, len(own), len(own) - differ - untraced, differ, untraced))
    return found


def table(verdicts: Sequence[Verdict]) -> str:
    """All as markdown."""
    lines = [
        "# Operators on a GPU: eager beside gpipe_fast",
        "",
        f"torch {torch.__version__.split('+')[0]}; fake tensors on a GPU of compute capability 9.0, which is "
        "not there.",
        "Operators that lead to outputs, gradients and buffers, in order, those of eager autograd beside",
        "those of the trace; and, but for the order, those of the programs. Views, uninitialised memory and",
        "constants are left out.",
        "",
        "| mode | configurations | equal | differ, understood | not traced |",
        "|---|---|---|---|---|",
        *(f"| {' | '.join(map(str, row))} |" for row in counts(verdicts)),
        "",
        "| difference | configurations | why |",
        "|---|---|---|",
    ]
    reasons: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        for line, text in explained(verdict).items():
            reasons.setdefault((text or "unknown", line), []).append(f"{verdict.name} ({verdict.mode})")
    for (text, line), names in sorted(reasons.items()):
        several = f"{len(names)}, such as " if len(names) > 1 else ""
        lines.append(f"| `{line}` | {several}{names[0]} | {text} |")
    lines += ["", "| not traced, so eager in both | why |", "|---|---|"]
    lines += [f"| {v.name} ({v.mode}) | {v.reason} |" for v in verdicts if v.reason is not None]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compares all configurations in all modes, and writes the table."""
    verdicts = run(ALL, build())
    RESULTS.write_text(table(verdicts))
    print(f"wrote {RESULTS.name}:", *counts(verdicts)[-1])


if __name__ == "__main__":
    main()
