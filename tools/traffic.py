"""Counts the bytes that the backward of a recomputed segment moves, with fused kernels and with PyTorch.

Bytes are counted on meta tensors. An operator reads its inputs and writes its outputs, each storage once;
views and allocations move nothing. A kernel reads its arguments, except tensors that are allocated but not
yet written: it writes these, and the tensors that it updates in place.

Counted, not measured: bytes that operators and kernels read and write for {millions} M elements. Unfused:
PyTorch recomputes the forward, then computes the gradients, one operator at a time. Fused: one kernel,
including partial sums and their addition; rotary embedding has one launch each for forward and backward.
Cross-entropy with the linear layer saves memory: the full logits never exist.
"""

from __future__ import annotations

from bench.gpu.case import DTYPES, KernelCase
from bench.gpu.families import all_cases
from bench.gpu.traffic import fused_bytes, unfused_bytes
from bench.measure import report

ELEMENTS = 1 << 24


def row(case: KernelCase, dtype: str, elements: int = ELEMENTS) -> list[object]:
    """Returns a row of the table: bytes per element, and the saved fraction."""
    unfused, fused = (count(case, elements, DTYPES[dtype]) for count in (unfused_bytes, fused_bytes))
    return [case.name, dtype, unfused / elements, fused / elements, f"{1 - fused / unfused:.0%}"]


def main() -> None:
    report(
        globals(),
        ["function", "dtype", "unfused, bytes per element", "fused", "saving"],
        [row(case, dtype) for case in all_cases().values() for dtype in DTYPES],
        millions=ELEMENTS >> 20,
    )
