"""The table of operators in which eager autograd and gpipe_fast differ on a GPU, each difference explained.

`python -m tests.contracts.contract_1_same_bits.cuda_operators_table` writes it to
`bench/results/cuda_operators.md`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.measure import RESULTS, machine
from tests.contracts.contract_1_same_bits.cuda_operators import ALL_CONFIGURATIONS, MODES, Verdict
from tests.fake_cuda import process
from tests.fake_cuda.build import build

TABLE = RESULTS / "cuda_operators.md"
PROGRAM = Path(__file__).with_name("cuda_operators.py")


def run_configurations(
    configurations: Sequence[tuple[str, str]], libraries: tuple[Path, Path]
) -> list[Verdict]:
    """Returns the verdicts of configurations (mode, name), from processes with the fake CUDA runtime."""
    arguments = [f"{mode}/{name}" for mode, name in configurations]
    batches = [arguments[begin : begin + 100] for begin in range(0, len(arguments), 100)]
    lines = [line for batch in batches for line in process.run(str(PROGRAM), libraries, *batch, limit=1200)]
    return [Verdict(**json.loads(line)) for line in lines if line.startswith("{")]


@dataclass(frozen=True)
class Explanation:
    """Why operators differ although no result does.

    Attributes:
        lines: the lines of the diff that this explains.
        text: the explanation.
        modes: the modes to which it applies; empty for all.
        names: a regular expression for the configurations to which it applies.
    """

    lines: frozenset[str]
    text: str
    modes: frozenset[str] = frozenset()
    names: str = ""

    def applies_to(self, verdict: Verdict, line: str) -> bool:
        """Returns whether this explains `line` of a verdict's diff."""
        mode_applies = not self.modes or verdict.mode in self.modes
        return mode_applies and line in self.lines and re.search(self.names, verdict.name) is not None


_DIRECTIONS = ("forward", "backward")
_WITH_BATCH_NORM = "BatchNorm|InstanceNorm|batch norm|instance norm|^(paper|model):"
EXPLANATIONS = (
    Explanation(
        frozenset(
            f"{d}: + {kind}_scatter" for d in _DIRECTIONS for kind in ("slice", "select", "as_strided")
        ),
        "A functional graph replaces a write into a view by a copy of the whole tensor with that part "
        "replaced: elements are moved, and none is computed.",
    ),
    Explanation(
        frozenset({"forward: + _to_copy"}),
        "For 16-bit running statistics PyTorch's fake batch norm returns 32-bit ones, which the trace casts "
        "back. The kernels return 16-bit statistics, so the cast is a copy.",
        modes=frozenset({"bf16", "fp16"}),
        names=_WITH_BATCH_NORM,
    ),
    Explanation(
        frozenset({"backward: - clone"}),
        "Eager makes the gradient contiguous before it calls `cudnn_batch_norm_backward`; "
        "`batch_norm_backward`, which the trace calls, does so itself.",
        names=_WITH_BATCH_NORM,
    ),
    Explanation(
        frozenset({"backward: - add"}),
        "The gradients of several uses of a parameter are added to its accumulator, in autograd's order, "
        "not to each other.",
        names="^layers: weight ",
    ),
    Explanation(
        frozenset({"backward: - addmm", "backward: - gelu", "backward: - _to_copy"}),
        "Eager recomputes in the backward what `torch.utils.checkpoint` discarded. The trace contains these "
        "operators once, and GPipe's own checkpoint policy decides whether they are recomputed.",
        names="nested checkpoint",
    ),
    Explanation(
        frozenset(
            {"forward: - rrelu_with_noise", "forward: + leaky_relu", "forward: + clone", "forward: + copy"}
        ),
        "Outside of training, `rrelu_with_noise` calls `leaky_relu`, which the trace contains. It copies "
        "the noise, of which the backward then reads no element.",
        modes=frozenset({"evaluation", "inference"}),
        names="^RReLU",
    ),
)


def explain(verdict: Verdict) -> dict[str, str | None]:
    """Returns the lines in which a configuration differs, each with its explanation or None."""
    texts = {line: [e.text for e in EXPLANATIONS if e.applies_to(verdict, line)] for line in verdict.differs}
    return {line: found[0] if found else None for line, found in texts.items()}


def counts(verdicts: Sequence[Verdict]) -> list[tuple[str, int, int, int, int]]:
    """Returns for each mode, and for all: name, configurations, equal ones, differing ones, untraced ones."""
    found = []
    for mode in (*MODES, "all"):
        own_verdicts = [v for v in verdicts if mode in (v.mode, "all")]
        num_untraced = sum(v.reason is not None for v in own_verdicts)
        num_differing = sum(bool(explain(v)) for v in own_verdicts)
        found.append(
            (
                mode,
                len(own_verdicts),
                len(own_verdicts) - num_differing - num_untraced,
                num_differing,
                num_untraced,
            )
        )
    return found


def table(verdicts: Sequence[Verdict]) -> str:
    """Returns the verdicts as a Markdown table."""
    lines = [
        "# Operators on a GPU: eager autograd and gpipe_fast",
        "",
        f"{machine()}.",
        "Fake tensors on a simulated GPU of compute capability 9.0.",
        "The operators on which outputs, gradients and buffers depend are compared: eager autograd's with",
        "the trace's, in order. Views, uninitialised memory and constants are omitted.",
        "",
        "| mode | configurations | equal | differ, explained | not traced |",
        "|---|---|---|---|---|",
        *(f"| {' | '.join(map(str, row))} |" for row in counts(verdicts)),
        "",
        "| difference | configurations | why |",
        "|---|---|---|",
    ]
    reasons: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        for line, text in explain(verdict).items():
            reasons.setdefault((text or "unknown", line), []).append(f"{verdict.name} ({verdict.mode})")
    for (text, line), names in sorted(reasons.items()):
        several = f"{len(names)}, such as " if len(names) > 1 else ""
        lines.append(f"| `{line}` | {several}{names[0]} | {text} |")
    lines += ["", "| not traced (runs in Python) | why |", "|---|---|"]
    lines += [f"| {v.name} ({v.mode}) | {v.reason} |" for v in verdicts if v.reason is not None]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compares all configurations and writes the table."""
    verdicts = run_configurations(ALL_CONFIGURATIONS, build())
    TABLE.write_text(table(verdicts))
    print(f"wrote {TABLE.name}:", *counts(verdicts)[-1])


if __name__ == "__main__":
    main()
