"""The census of torch.nn: whether each layer is lowered, and whether it equals the plain loop.

`python -m tests.contracts.contract_1_same_bits.census` writes the table to `bench/results/census.md`.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter

import torch

from bench.measure import RESULTS, machine
from tests.contracts.contract_1_same_bits.equality import Run, Step, differences, train_both
from tests.contracts.contract_1_same_bits.torch_layers import OUT_OF_SCOPE, RECIPES

TABLE = RESULTS / "census.md"


def thorough_run(name: str) -> Run:
    """Returns a run that has every pair of a memory format, a number of micro-batches and a share."""
    sizes, shares, layouts = [(2, 1), (8, 4), (7, 4), (34, 2)], [0.0, 0.5, 1.0], ["contiguous", "permuted"]
    if len(RECIPES[name].shape) > 2:
        layouts.append("channels_last")
    steps = [
        Step(*size, checkpoint=shares[(i + j) % 3], layout=layout)
        for (i, size), (j, layout) in itertools.product(enumerate(sizes), enumerate(layouts))
    ]
    steps += [Step(7, 4, layout=layout, training=False, mode="no_grad") for layout in layouts]
    num_layers = 2 if RECIPES[name].integers else 3
    # Many steps of SGD on sums over large batches would make the outputs of convolutions infinite.
    return Run(subject=f"torch.nn: {name}", balance=(num_layers,), optimizer="AdamW", steps=tuple(steps))


def examine(name: str) -> str:
    """Returns a row's result."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        different = differences(*train_both(thorough_run(name)))
    if different:
        return f"different: {different[0]}"
    reasons = [str(w.message).partition("runs in Python: ")[2] for w in caught]
    reason = next((reason.partition("; other layers")[0] for reason in reasons if reason), None)
    return "native and equal" if reason is None else f"Python stage: {reason}"


def _counts(verdicts: dict[str, str]) -> Counter[str]:
    return Counter(verdict.partition(":")[0] for verdict in verdicts.values())


def table(verdicts: dict[str, str]) -> str:
    """Returns the census as Markdown."""
    classes = {name.split()[0] for name in verdicts}
    lines = [
        "# Census of torch.nn",
        "",
        f"{machine()}.",
        f"{len(classes)} classes in {len(verdicts)} configurations; {len(OUT_OF_SCOPE)} out of scope.",
        "Shares 0, 0.5 and 1; one micro-batch, four even and uneven ones, two of 17 samples; contiguous,",
        "channels_last and permuted inputs, each pair of two of them; training (output, gradients, buffers)",
        "and inference, against the plain loop.",
        "",
        "| result | configurations |",
        "|---|---|",
        *(f"| {kind} | {count} |" for kind, count in _counts(verdicts).most_common()),
        "",
        "| layer | result |",
        "|---|---|",
        *(f"| {name} | {verdict} |" for name, verdict in sorted(verdicts.items())),
        *(f"| {name} | out of scope: {reason} |" for name, reason in sorted(OUT_OF_SCOPE.items())),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the census and writes the table."""
    torch.set_num_threads(1)
    verdicts = {name: examine(name) for name in RECIPES}
    TABLE.write_text(table(verdicts))
    print(f"wrote {TABLE.name}:", dict(_counts(verdicts)))


if __name__ == "__main__":
    main()
