"""What benchmarks know of each kernel family.

A family plugs in with a file of its own here: `CASES`, a `Case` for each function that is worth a row of a
table, whose name begins with the family's word as its variants' names do, and `TUNINGS`, what can be tuned;
and with its name in `FAMILIES`. `bench.traffic` then counts its bytes, `bench.kernels` measures it on a GPU,
`bench.tune` tunes it, tests/bench/test_bench_kernels.py compares what was registered with PyTorch on the CPU,
and tests/kernels/test_cuda.py with PyTorch on a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

from bench.case import Case, Tuning

FAMILIES = ("activations", "cross_entropy", "dropout", "gated", "multi_tensor", "norms", "rotary")


def all_cases() -> dict[str, Case]:
    """By name."""
    return {case.name: case for family in FAMILIES for case in _module(family).CASES}


def all_tunings() -> dict[str, Tuning]:
    """By the kernel's name."""
    return {tuning.kernel: tuning for family in FAMILIES for tuning in _module(family).TUNINGS}


def _module(family: str) -> Any:
    return importlib.import_module(f"bench.families.{family}")
