"""Registry of the kernel families for benchmarks and tests.

To add a family, add a file here and its name to `FAMILIES`. The file defines `CASES`, a `KernelCase` for each
function with a row in a table. The names of cases begin with the family's word, like the names of its
variants. `tools.traffic` counts the bytes of the cases, `bench.gpu.kernels` measures them on a GPU,
tests/bench/test_bench_kernels.py compares the cases with PyTorch on the CPU, and
tests/unit/kernels/test_cuda.py on a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

from bench.gpu.case import KernelCase

FAMILIES = ("cross_entropy", "mean_loss", "partial_sums", "rotary", "stacks")


def all_cases() -> dict[str, KernelCase]:
    """Returns the cases of all families, by name."""
    return {case.name: case for family in FAMILIES for case in _module(family).CASES}


def _module(family: str) -> Any:
    return importlib.import_module(f"bench.gpu.families.{family}")
