"""Times of a GPU, by its own clock, of candidates that take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.case import Case, copied

# Written before each sample: more than any L2 cache holds.
FLUSHED_BYTES = 256 << 20
# About a millisecond, in which the CPU gets ahead: launches of the sample then follow each other at once.
AHEAD_CYCLES = 2_000_000
DROPPED_ROUNDS = 3

Sample = Callable[[Mapping[str, "Candidate"], int], Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class Candidate:
    """What is timed.

    Attributes:
        run: computes once.
        reset: restores, untimed, what ``run`` overwrites.
    """

    run: Callable[[], object]
    reset: Callable[[], None] = lambda: None


def on_copies(
    function: Callable[[Sequence[Tensor], Sequence[Tensor]], object],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> Candidate:
    """Of a function that overwrites its inputs or gradients."""
    given = [*inputs, *gradients]
    own = copied(given)

    def reset() -> None:
        for tensor, original in zip(own, given, strict=True):
            tensor.copy_(original)

    return Candidate(lambda: function(own[: len(inputs)], own[len(inputs) :]), reset)


def ours(case: Case, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Candidate:
    """The fused function of a case."""
    if case.overwritten:
        return on_copies(case.fused, inputs, gradients)
    return Candidate(lambda: case.fused(inputs, gradients))


def samples(candidates: Mapping[str, Candidate], rounds: int) -> dict[str, list[float]]:
    """Microseconds of each candidate in each round, between two events on the GPU; L2 is flushed before."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for round_index in range(rounds + DROPPED_ROUNDS):
        for name, candidate in candidates.items():
            candidate.reset()
            torch.cuda._sleep(AHEAD_CYCLES)
            flushed.zero_()
            begin.record()
            candidate.run()
            end.record()
            torch.cuda.synchronize()
            if round_index >= DROPPED_ROUNDS:
                found[name].append(begin.elapsed_time(end) * 1e3)
    return found
