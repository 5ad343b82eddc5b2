"""Compiles the kernels of the benchmarks' models for an H100 or H200 into a folder, without a GPU.

`python -m tools.on_gpu.precompile [row ...]` lowers the models on the meta device and compiles what their
programs launch with the installed Triton, which must be that of the GPU machine. The folder goes there
together with the tree, and `make gpu` uses it as the disk cache; what differs there is compiled there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import torch

from bench.gpu.bare import programs_of
from bench.gpu.subjects import ROWS, STAGES, Subject
from gpipe_fast import GPipe
from gpipe_fast.container import runner_of
from gpipe_fast.fuse.cubin import FOLDER_VARIABLE, CompileFailure
from gpipe_fast.fuse.cubins import cubins, sources_of
from gpipe_fast.lower.launch import KernelLaunch
from gpipe_fast.lower.steps import Launch
from gpipe_fast.runtime.runner import Runner
from tools.on_gpu.cases import BATCH, CHUNKS, MODELS

FOLDER = Path(__file__).parents[2] / "build" / "gpu" / "triton"
CAPABILITY = (9, 0)


def launches(subject: Subject) -> Iterator[KernelLaunch]:
    """Yields the launches of a subject's programs on a GPU that the machine need not have."""
    model = subject.model("meta")
    balance, devices = subject.balance(len(model)), ["cpu"] * STAGES
    pipe = GPipe(model, balance, devices=devices, chunks=subject.chunks, checkpoint=subject.checkpoint)
    dtype = subject.dtype if subject.vocab is None else torch.long
    planner = runner_of(pipe).planner_for(balance, [torch.device("cuda")] * STAGES, is_absent=True)
    with mock.patch.object(Runner, "planner_for", return_value=planner):
        pipe.memory(torch.zeros((subject.batch, *subject.sample), dtype=dtype, device="meta"), device="cuda")
    for program, _ in programs_of(planner, subject.checkpoint, subject.chunks):
        yield from (step.launch for step in program.steps if isinstance(step, Launch))


def subjects() -> dict[str, list[Subject]]:
    """Returns the subjects of each row, and under 'checks' the GPT with which `make gpu` begins."""
    make, sample, vocab = MODELS["gpt"]
    checked = Subject(make, sample, BATCH, CHUNKS, vocab, checkpoint="except_last")
    return {"checks": [checked], **{name: [row.full, row.small] for name, row in ROWS.items()}}


def main(names: Sequence[str] = ()) -> bool:
    """Compiles the kernels of rows, and returns whether all of them compile."""
    os.environ.setdefault(FOLDER_VARIABLE, str(FOLDER))
    good, every = True, subjects()
    for name in names or every:
        begin, own = time.monotonic(), every[name]
        found = [launch for subject in own for launch in launches(subject)]
        unique = {launch.specialization: launch for launch in found}.values()
        made = cubins([source for launch in unique for source in sources_of(launch)], CAPABILITY)
        failures = [each.reason for each in made if isinstance(each, CompileFailure)]
        print(f"{name}: {len(unique)} kernels, {time.monotonic() - begin:.0f} s", *failures, flush=True)
        good = good and not failures
    print(f"Triton {version('triton')}, {os.environ[FOLDER_VARIABLE]}", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:]) else 1)
