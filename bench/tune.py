"""`python -m bench.tune [kernel ...]`: tunes kernels on this GPU and saves the results in kernels/tuned.json.

`python -m bench` does not run it, because it changes the kernels' launch configurations.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.case import DTYPES, AccuracyCheck, Tuning
from bench.families import all_tunings
from bench.gpu import Candidate, Sample, ours, samples
from gpipe_fast.kernels.launch import Config, override_config, save_tuned

ROUNDS = 30
# Another configuration replaces the current one only if it is faster by more than this fraction.
MARGIN = 0.02
CURRENT = "current"


@dataclass(frozen=True)
class Outcome:
    """The tuning result of one shape class.

    Attributes:
        config: the fastest configuration, or None if the current one stays.
        gain: the time of the current configuration divided by the time of the fastest.
        dropped: the number of candidates that failed to compile or computed wrong results.
    """

    config: Config | None
    gain: float
    dropped: int


def search(tuning: Tuning, name: str, device: str = "cuda", sample: Sample = samples) -> Outcome:
    """Times a kernel's configurations for one shape class, in every dtype.

    Raises:
        AssertionError: the kernel computes wrong results with the current configuration.
    """
    shape = tuning.shapes[name]
    configs: dict[str, Config | None] = {CURRENT: None} | {str(c): c for c in shape.candidates}
    times = dict.fromkeys(configs, 1.0)
    for dtype in DTYPES.values():
        torch.manual_seed(0)
        inputs = shape.inputs(dtype, device)
        gradients = tuning.case.gradients(inputs)
        accuracy_check = AccuracyCheck.of(tuning.case, inputs, gradients)
        timed = {key: _candidate(tuning, name, configs[key], inputs, gradients) for key in times}
        timed = {key: candidate for key, candidate in timed.items() if _is_right(candidate, accuracy_check)}
        assert CURRENT in timed, f"{tuning.kernel} {name} computes wrong results in {dtype}"
        times = {key: times[key] * statistics.median(found) for key, found in sample(timed, ROUNDS).items()}
    best = min(times, key=lambda key: times[key])
    gain = (times[CURRENT] / times[best]) ** (1 / len(DTYPES))
    dropped = len(configs) - len(times)
    return Outcome(configs[best] if gain > 1 + MARGIN else None, gain, dropped)


def _candidate(
    tuning: Tuning, name: str, config: Config | None, inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> Candidate:
    candidate = ours(tuning.case, inputs, gradients)

    def run() -> object:
        with contextlib.nullcontext() if config is None else override_config(tuning.kernel, name, config):
            return candidate.run()

    return replace(candidate, run=run)


def _is_right(candidate: Candidate, accuracy_check: AccuracyCheck) -> bool:
    candidate.reset()
    try:
        return accuracy_check.error_ratio(candidate.run()) <= 1  # type: ignore[arg-type]
    except Exception as error:  # too many registers, too much shared memory
        print(f"  dropped: {type(error).__name__}: {str(error).splitlines()[:1]}")
        return False


def main(arguments: Sequence[str] | None = None) -> None:
    tunings = all_tunings()
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    parser.add_argument("kernel", nargs="*", help=f"kernels to tune; by default all: {', '.join(tunings)}")
    wanted = parser.parse_args(arguments).kernel or list(tunings)
    unknown = [name for name in wanted if name not in tunings]
    if unknown:
        parser.error(f"unknown kernel: {', '.join(unknown)}; known kernels: {', '.join(tunings)}")
    if not torch.cuda.is_available():
        parser.error("tuning needs a GPU, but no GPU is visible")
    for kernel in wanted:
        for name in tunings[kernel].shapes:
            found = search(tunings[kernel], name)
            print(f"{kernel} {name}: {found.config or CURRENT}, {found.gain:.2f} x, {found.dropped} dropped")
            if found.config is not None:
                save_tuned(torch.cuda.get_device_name(), kernel, name, found.config)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
