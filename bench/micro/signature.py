"""Overhead of a call before any stage runs: checking that nothing changed since the last call.

Calls without changes, under no_grad. The modules are Linear(8, 8) and ReLU, alternately, in two stages; 8
micro-batches of one sample. The Python part is a whole call, including the check for changes, of a pipeline
whose C++ part returns immediately.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn

from bench.comparison import Comparison, Opened, report_comparisons
from gpipe_fast import GPipe
from gpipe_fast.container import runner_of
from gpipe_fast.layers.structure import ONE_TENSOR, Structure

CHECK, PYTHON, WHOLE = "check for changes", "Python part of a call", "whole call"


class _StubPipeline:
    """A stub for a C++ pipeline; its forward returns immediately."""

    def __init__(self, outputs: list[Tensor]) -> None:
        self._outputs = outputs

    def forward(self, *arguments: object) -> tuple[list[Tensor], Structure]:
        return self._outputs, ONE_TENSOR


def parts(num_modules: int) -> dict[str, Callable[[], object]]:
    """Returns the parts of a repeated call, without gradients, of a pipeline of so many modules."""
    layers = [nn.Linear(8, 8) if index % 2 == 0 else nn.ReLU() for index in range(num_modules)]
    half = num_modules // 2
    pipe = GPipe(nn.Sequential(*layers), [half, num_modules - half], devices=["cpu"] * 2, chunks=8)
    input = torch.randn(8, 8)
    stub = deepcopy(pipe)
    with torch.no_grad():
        pipe(input)
        output = stub(input)
        assert torch.equal(output, pipe(input))
        runner_of(stub).pipeline = _StubPipeline([output])  # type: ignore[assignment]
        assert stub(input) is output
    without = torch.no_grad()
    return {
        WHOLE: without(lambda: pipe(input)),
        PYTHON: without(lambda: stub(input)),
        CHECK: runner_of(pipe).detect_changes,
    }


def _opened(num_modules: int, stack: ExitStack) -> Opened:
    stack.enter_context(torch.no_grad())
    return parts(num_modules), None


COMPARISONS = [
    Comparison(
        f"call of {n} modules", [WHOLE, PYTHON, CHECK], partial(_opened, n), 40, calls=20, sampled=True
    )
    for n in (10, 500)
]


def main() -> None:
    report_comparisons(globals(), in_us=True)
