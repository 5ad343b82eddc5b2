"""What a call costs before any stage runs: to find out that nothing changed."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from bench.measure import alternate, report
from gpipe_fast import GPipe
from gpipe_fast.layers.structure import ONE_TENSOR, Structure

SIZES = (10, 500)


class _Instead:
    """Stands for a C++ pipeline whose forward takes no time."""

    def __init__(self, outputs: list[Tensor]) -> None:
        self._outputs = outputs

    def forward(self, *arguments: object) -> tuple[list[Tensor], Structure]:
        return self._outputs, ONE_TENSOR


def unchanged(num_modules: int, rounds: int, calls: int) -> list[object]:
    """Median µs of a call's parts, the second call and later ones of a pipeline of so many modules."""
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
        stub._pipeline = _Instead([output])  # type: ignore[assignment]
        timings = alternate(
            {"look": pipe._look, "python": lambda: stub(input), "whole": lambda: pipe(input)}, rounds, calls
        )
        assert stub(input) is output
    return [num_modules, len(list(pipe.parameters())), *map(str, timings.values())]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report(
        "signature",
        "What a call costs before any stage runs",
        ["modules", "parameters", "look for changes", "all Python of a call", "whole call"],
        [unchanged(size, rounds=40, calls=20) for size in SIZES],
        "µs, medians [p20, p80] of calls in which nothing has changed. Linear(8, 8) and ReLU in turn, two "
        "stages, 8 micro-batches of one sample, under no_grad. All Python is a whole call, with the look, of "
        "a pipeline whose C++ part returns at once.\n",
    )


if __name__ == "__main__":
    main()
