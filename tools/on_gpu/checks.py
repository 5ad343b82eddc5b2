"""Runs small cases on a GPU and keeps a growing table of results: `python -m tools.on_gpu.checks models`.

The cases run one after the other in a child process; if one crashes its process or hangs, a new process
continues with the next.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from bench import case_processes, measure

SECONDS = float(os.environ.get("GPIPE_FAST_SECONDS", "60"))
TITLES = {
    "models": "Steps of each model on GPUs, compared with the plain loop",
    "plans": "Interleaved plans and precision on GPUs, compared with the plain loop",
    "memory": "Memory of a stage on a GPU, compared with its prediction and with limits",
}
HEADERS = ("case", "result", "captured", "s")
STEPS_NOTE = (
    "Outputs, gradients and buffers of several steps are compared bit for bit with the plain loop's, under "
    "deterministic algorithms. Fused kernels are compared with float64: their error may be twice that of the "
    "plain loop. From the third step on, a replay is expected; if there is none, the column 'captured' gives "
    "the reason.\n"
)
NOTES = {
    "models": STEPS_NOTE,
    "plans": STEPS_NOTE,
    "memory": "All layers are one stage, and there are four micro-batches. The bytes are the most that a "
    "third step allocates beside the mini-batch and what libraries keep; the prediction may be off by 2%. A "
    "limit is half-way between what a step needs if everything is recomputed, and if nothing is.\n",
}


def run_in_this_process(phase: str, names: Sequence[str]) -> None:
    """Runs cases in this process and sends the results; raises if the device has become unusable."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from tools.on_gpu.cases import PHASES

    cases = PHASES[phase]()

    def check(name: str) -> list[object]:
        torch.use_deterministic_algorithms(True, warn_only=True)
        verdict = cases[name]()
        return [verdict.good, verdict.text, verdict.captured]

    case_processes.serve(names, check)


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.on_gpu.checks", description=__doc__)
    parser.add_argument("phase", choices=TITLES)
    parser.add_argument("name", nargs="*", help="cases to run (default: all)")
    parser.add_argument("--file", help="name of the written file (default: gpu-PHASE)")
    parser.add_argument("--here", action="store_true", help="run the cases in this process, for a parent")
    options = parser.parse_args(arguments)
    if options.here:
        run_in_this_process(options.phase, options.name)
        return
    from tools.on_gpu.cases import PHASES

    every, file = list(PHASES[options.phase]()), options.file or f"gpu-{options.phase}"
    if unknown := set(options.name) - set(every):
        parser.error(f"unknown case: {', '.join(unknown)}; choose from {', '.join(every)}")
    names, rows, passed = options.name or every, list[list[object]](), 0

    def keep(name: str, found: Any, seconds: float) -> None:
        nonlocal passed
        good, text, captured = (False, found, "") if isinstance(found, str) else found
        passed += good
        rows.append([name, text, captured, seconds])
        measure.write(file, TITLES[options.phase], HEADERS, rows, NOTES[options.phase])
        print(f"{name}: {text} [{captured}] {seconds:.1f} s", flush=True)

    command = case_processes.command_of("tools.on_gpu.checks", options.phase)
    for name in case_processes.run_cases(command, names, SECONDS, keep):
        keep(name, "not finished: no time left", 0.0)
    print(f"{passed} of {len(names)} cases passed", flush=True)
    sys.exit(0 if passed == len(names) else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
