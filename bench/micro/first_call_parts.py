"""Runs the first calls of one model, and prints the processor time of their parts as JSON."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F

from bench.micro.first_call_process import CHUNKS, MODELS
from gpipe_fast import GPipe
from gpipe_fast.lower import accumulation, program_template
from gpipe_fast.runtime import compiled, equal_layers, garbage
from gpipe_fast.runtime.compiled import CompiledStage
from gpipe_fast.trace.symbolic import Template

PARTS: tuple[tuple[Any, str, str], ...] = (
    (equal_layers, "trace", "trace"),
    (equal_layers, "join", "join equal layers"),
    (Template, "instantiate", "verify the template"),
    (compiled, "split", "split"),
    (compiled, "lower_graphs", "lower"),
    (program_template, "split", "split"),
    (program_template, "lower_graphs", "lower"),
    (program_template, "lower_unplaced", "lower with formulas"),
    (program_template.ProgramTemplate, "at", "derive from formulas"),
    (accumulation, "addmm_is_bitwise_equal", "trials of products"),
    (CompiledStage, "_program_pair", "build C++ programs"),
    (garbage, "trim_heaps", "return memory"),
)
OTHER = "plan, checks, and the step itself"


class Times(defaultdict[str, float]):
    """Seconds of processor time of this process by part, each without the parts inside of it."""

    def __init__(self) -> None:
        super().__init__(float)
        self._inside: list[float] = []

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Times all calls of a function."""
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            self._inside.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.process_time() - begin
                self[part] += seconds - self._inside.pop()
                if self._inside:
                    self._inside[-1] += seconds

        setattr(owner, name, timed)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    case, times = MODELS[sys.argv[1]](), Times()
    for owner, name, part in PARTS:
        times.wrap(owner, name, part)
    model = GPipe(case.layers, case.balance, devices=["cpu"] * 2, chunks=CHUNKS)
    steps: list[dict[str, float]] = []
    for batch, targets in case.batches:
        times.clear()
        begin = time.process_time()
        F.cross_entropy(model(batch).flatten(0, -2), targets.flatten()).backward()
        total = time.process_time() - begin
        steps.append({**times, OTHER: total - sum(times.values())})
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
