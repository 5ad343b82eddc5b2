"""Overhead of a call before any stage runs: checking that nothing changed since the last call."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from bench.measure import alternate, report
from gpipe_fast import GPipe
from gpipe_fast.layers.structure import ONE_TENSOR, Structure

SIZES = (10, 500)


class _StubPipeline:
    """A stub for a C++ pipeline; its forward returns immediately."""

    def __init__(self, outputs: list[Tensor]) -> None:
        self._outputs = outputs

    def forward(self, *arguments: object) -> tuple[list[Tensor], Structure]:
        return self._outputs, ONE_TENSOR


def time_unchanged_calls(num_modules: int, rounds: int, calls: int) -> list[object]:
    """Returns median times (µs) of a call's parts, for repeated calls of a pipeline."""
    layers = [nn.Linear(8, 8) if index % 2 == 0 else nn.ReLU() for index in range(num_modules)]
    half = num_modules // 2
    sizes = [half, num_modules - half]
    pipe = GPipe(nn.Sequential(*layers), sizes, devices=["cpu"] * 2, chunks=8)
    input = torch.randn(8, 8)
    stub = deepcopy(pipe)
    with torch.no_grad():
        pipe(input)
        output = stub(input)
        assert torch.equal(output, pipe(input))
        stub._pipeline = _StubPipeline([output])  # type: ignore[assignment]
        timings = alternate(
            {"look": pipe._detect_changes, "python": lambda: stub(input), "whole": lambda: pipe(input)},
            rounds,
            calls,
        )
        assert stub(input) is output
    return [num_modules, len(list(pipe.parameters())), *map(str, timings.values())]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report(
        "signature",
        "Overhead of a call before any stage runs",
        ["modules", "parameters", "check for changes", "Python part of a call", "whole call"],
        [time_unchanged_calls(size, rounds=40, calls=20) for size in SIZES],
        "Times in µs, medians [p20, p80] of calls without changes. The modules are Linear(8, 8) and ReLU, "
        "alternately, in two stages; 8 micro-batches of one sample, under no_grad. The Python part is a "
        "whole call, including the check for changes, of a pipeline whose C++ part returns immediately.\n",
    )


if __name__ == "__main__":
    main()
