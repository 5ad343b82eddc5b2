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
from tests.examples.commands import ROOT

pytestmark = [needs_gloo, pytest.mark.extended, pytest.mark.xdist_group("torchrun")]

STEPS, EVERY = 8, 3
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "GPIPE_FAST_PROGRESS": "0",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}

# Runs the example, but kills a rank once, before a step or before the checkpoint of that step is complete.
KILLING = """
import os, signal, sys
from pathlib import Path
from torch.distributed.checkpoint import FileSystemWriter
sys.path.insert(0, {root!r})
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


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    """Returns the losses of a run in two parts, by three processes and by two."""
    folder, script = tmp_path_factory.mktemp("uninterrupted"), ROOT / "examples" / "gpt_distributed.py"
    return run(folder, script, 3, "--steps=5") | run(folder, script, 2, f"--steps={STEPS}")


def test_fewer_processes_go_on_from_a_checkpoint(uninterrupted: dict[int, list[str]]) -> None:
    assert uninterrupted.keys() == set(range(1, STEPS + 1))
    assert float(uninterrupted[STEPS][0]) < float(uninterrupted[1][0])


@pytest.mark.parametrize(("rank", "at", "in_save"), [(1, 5, False), (0, 6, True)])
def test_a_restart_after_a_kill(
    rank: int, at: int, in_save: bool, tmp_path: Path, uninterrupted: dict[int, list[str]]
) -> None:
    script = tmp_path / "killing.py"
    script.write_text(KILLING.format(root=str(ROOT), rank=rank, at=at, in_save=in_save))
    losses = run(tmp_path, script, 2, f"--steps={STEPS}", f"--every={EVERY}")
    for step, found in losses.items():
        assert set(found) == set(uninterrupted[step]), f"step {step}"
    last = at if in_save else at - 1  # the last step that was finished before
    assert [step for step, found in losses.items() if len(found) == 2] == list(range(EVERY + 1, last + 1))
    assert losses.keys() == set(range(1, STEPS + 1))
    assert last_step(tmp_path / "build" / "gpt_distributed") == STEPS
