"""Times alternating candidates on a GPU with CUDA events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.case import KernelCase, clone_all

# Bytes written before each sample to flush L2: more than any L2 cache holds.
FLUSHED_BYTES = 256 << 20
# GPU cycles (about a millisecond) in which the CPU enqueues the launches of a sample, so that they run
# without gaps.
ENQUEUE_CYCLES = 2_000_000
WARMUP_ROUNDS = 3

Sample = Callable[[Mapping[str, "Candidate"], int], Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class Candidate:
    """A function to be timed.

    Attributes:
        run: computes once.
        reset: restores the tensors that ``run`` overwrites; not timed.
    """

    run: Callable[[], object]
    reset: Callable[[], None] = lambda: None


def candidate_on_copies(
    function: Callable[[Sequence[Tensor], Sequence[Tensor]], object],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> Candidate:
    """Makes a candidate from a function that overwrites its inputs or gradients."""
    given = [*inputs, *gradients]
    own = clone_all(given)

    def reset() -> None:
        for tensor, original in zip(own, given, strict=True):
            tensor.copy_(original)

    return Candidate(lambda: function(own[: len(inputs)], own[len(inputs) :]), reset)


def ours(case: KernelCase, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Candidate:
    """Makes a candidate from the fused function of a case."""
    if case.overwritten:
        return candidate_on_copies(case.fused, inputs, gradients)
    return Candidate(lambda: case.fused(inputs, gradients))


def samples(candidates: Mapping[str, Candidate], rounds: int) -> dict[str, list[float]]:
    """Returns the microseconds of each candidate in each round, between two GPU events, after an L2 flush."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for round_index in range(rounds + WARMUP_ROUNDS):
        for name, candidate in candidates.items():
            candidate.reset()
            torch.cuda._sleep(ENQUEUE_CYCLES)
            flushed.zero_()
            begin.record()
            candidate.run()
            end.record()
            torch.cuda.synchronize()
            if round_index >= WARMUP_ROUNDS:
                found[name].append(begin.elapsed_time(end) * 1e3)
    return found
