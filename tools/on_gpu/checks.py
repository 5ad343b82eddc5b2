"""Runs small cases on a GPU and keeps a growing table of results: `python -m tools.on_gpu.checks models`.

The cases run one after the other in a child process, `gpu_checks --here`; if one crashes its process or
hangs, a new process continues with the next.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from bench import measure
from gpipe_fast.reports.case_processes import ChildProcess, connect_to_parent, run_cases

SECONDS = float(os.environ.get("GPIPE_FAST_SECONDS", "60"))
PHASES = ("models", "plans")
TITLES = {
    "models": "Steps of each model on GPUs, compared with the plain loop",
    "plans": "Interleaved plans, memory and precision on GPUs, compared with the plain loop",
}
HEADERS = ("case", "compared with the plain loop", "captured", "s")
NOTE = (
    "Outputs, gradients and buffers of several steps are compared bit for bit with the plain loop's, under "
    "deterministic algorithms. Fused kernels are compared with float64: their error may be twice that of the "
    "plain loop. From the third step on, a replay is expected; if there is none, the column 'captured' gives "
    "the reason.\n"
)


def run_in_this_process(phase: str, names: Sequence[str]) -> None:
    """Runs cases in this process and sends the results; raises if the device has become unusable."""
    send = connect_to_parent()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from tools.on_gpu.cases import PHASES as CASES

    cases = CASES[phase]()
    for name in names:
        send(["begin", name])
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            verdict = cases[name]()
            result = [verdict.good, verdict.text, verdict.captured]
        except Exception as error:
            traceback.print_exc()
            words = " ".join(str(error).split())[:400]  # the table has one line per case
            result = [False, f"FAILED: {type(error).__name__}: {words}", ""]
        gc.collect()  # frees the memory of captured graphs
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        send(["end", name, *result])


class Results:
    """The table of one phase, rewritten with every row."""

    def __init__(self, phase: str) -> None:
        self._phase = phase
        self._rows: list[tuple[str, str, str, float]] = []
        self.passed = 0

    def keep(self, name: str, found: Sequence[Any] | str, seconds: float) -> None:
        """Adds a row: what the case sent, or how its process ended."""
        result: Sequence[Any] = [False, found, ""] if isinstance(found, str) else found
        good, text, captured = result
        self.passed += good
        self._rows.append((name, text, captured, seconds))
        measure.write(f"gpu-{self._phase}", TITLES[self._phase], HEADERS, self._rows, NOTE)
        print(f"{name}: {text} [{captured}] {seconds:.1f} s", flush=True)


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.on_gpu.checks", description=__doc__)
    parser.add_argument("phase", choices=PHASES)
    parser.add_argument("name", nargs="*", help="cases to run (default: all)")
    parser.add_argument("--here", action="store_true", help="run the cases in this process")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args(arguments)
    from tools.on_gpu.cases import PHASES as CASES

    every = list(CASES[options.phase]())
    if unknown := set(options.name) - set(every):
        parser.error(f"unknown case: {', '.join(unknown)}; choose from {', '.join(every)}")
    names = options.name or every
    if options.here:
        run_in_this_process(options.phase, names)
        return
    command = [sys.executable, "-X", "faulthandler", "-m", "tools.on_gpu.checks", "--here", options.phase]
    results = Results(options.phase)
    not_run = run_cases(names, options.seconds, lambda left: ChildProcess([*command, *left]), results.keep)
    for name in not_run:
        results.keep(name, "not finished: no time left", 0.0)
    print(f"{results.passed} of {len(names)} cases passed", flush=True)
    sys.exit(0 if results.passed == len(names) else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
