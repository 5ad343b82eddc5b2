"""The example for torchrun: a process is killed, all start again, and the losses are as without that."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.gpt_distributed import last_step
from tests.distributed.launch import needs_gloo
from tests.docs.markdown import ROOT

pytestmark = [needs_gloo, pytest.mark.extended, pytest.mark.xdist_group("torchrun")]

STEPS, EVERY = 8, 3
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "GPIPE_FAST_PROGRESS": "0",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}

# Runs the example, but kills a rank once: before a step, or before the checkpoint of a step is complete.
KILLING = """
import os, signal
from torch.distributed.checkpoint import FileSystemWriter
from examples import gpt_distributed
from gpipe_fast import GPipe

steps = 0
step, finish = GPipe.step, FileSystemWriter.finish

def before_step(*args, **kwargs):
    global steps
    steps += 1
    if not {in_save} and steps == {at}:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*args, **kwargs)

def before_finish(*args, **kwargs):
    if {in_save} and steps == {at}:
        os.kill(os.getpid(), signal.SIGKILL)
    return finish(*args, **kwargs)

if os.environ["RANK"] == "{rank}" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    GPipe.step, FileSystemWriter.finish = before_step, before_finish
gpt_distributed.main()
"""


def run(folder: Path, script: Path, number: int, *arguments: str) -> dict[int, list[str]]:
    """Runs a script in a folder; returns the losses that it prints, by step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={number}", "--max-restarts=1", str(script), *arguments],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses: dict[int, list[str]] = {}
    for step, loss in re.findall(r"^step (\d+): loss (\S+)$", done.stdout, re.MULTILINE):
        losses.setdefault(int(step), []).append(loss)
    return losses


def test_other_numbers_of_processes_and_restarts_after_a_kill_change_no_loss(tmp_path: Path) -> None:
    whole, example = tmp_path / "whole", ROOT / "examples" / "gpt_distributed.py"
    whole.mkdir()
    expected = run(whole, example, 3, "--steps=5") | run(whole, example, 2, f"--steps={STEPS}")
    assert expected.keys() == set(range(1, STEPS + 1))
    assert float(expected[STEPS][0]) < float(expected[1][0])
    for rank, at, in_save in [(1, 5, False), (0, 6, True)]:
        folder = tmp_path / f"rank{rank}"
        folder.mkdir()
        script = folder / "killing.py"
        script.write_text(KILLING.format(rank=rank, at=at, in_save=in_save))
        losses = run(folder, script, 2, f"--steps={STEPS}", f"--every={EVERY}")
        assert {step: set(found) for step, found in losses.items()} == {
            step: set(found) for step, found in expected.items()
        }
        last = at if in_save else at - 1  # the last step that was finished before
        assert [step for step, found in losses.items() if len(found) == 2] == list(range(EVERY + 1, last + 1))
        assert last_step(folder / "build" / "gpt_distributed") == STEPS
