"""The scripts that the pages show for torchrun train and save in several processes."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn

from gpipe_fast import GPipe
from tests.distributed.launch import needs_gloo, run_as_torchrun
from tests.docs.markdown import ROOT

pytestmark = needs_gloo

GETTING_STARTED = (ROOT / "docs" / "getting_started.md").read_text()
SEVERAL_MACHINES = (ROOT / "docs" / "guide" / "several_machines.md").read_text()


def blocks(page: str) -> list[str]:
    found = re.findall(r"^( *)```text\n(.*?)^\1```$", page, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in found]


def run(script: str, folder: Path, processes: int) -> str:
    (folder / "train.py").write_text(script)
    return run_as_torchrun(processes, "train.py", cwd=folder)


def layers() -> nn.Sequential:
    """Returns the layers of the page about several machines."""
    torch.manual_seed(0)
    hidden = nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(32, 1))


def load_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Reads in this process what others have written."""
    whole = {name: torch.zeros_like(tensor) for name, tensor in layers().state_dict().items()}
    dcp.load({"model": whole}, checkpoint_id=folder / "checkpoints" / "10", no_dist=True)
    return whole


def test_data_parallel_processes_train_and_save_plain_keys(tmp_path: Path) -> None:
    (script,) = (block for block in blocks(GETTING_STARTED) if "DistributedDataParallel(pipeline)" in block)
    run(script, tmp_path, 2)
    plain = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    plain.load_state_dict(torch.load(tmp_path / "model.pt"))


def test_stages_in_two_processes_train_as_one_process_does(tmp_path: Path) -> None:
    script, two_lines, *others = blocks(SEVERAL_MACHINES)
    checkpoint = next(block for block in others if "dcp.save(" in block)
    report = """
report = model.report(x, target=y, loss_fn=F.mse_loss)
if rank == 0:
    print(report)
    report.save("step.html")
"""
    more = ["rank, last = dist.get_rank(), dist.get_world_size() - 1", two_lines, report, checkpoint]
    end = "dist.destroy_process_group()"
    printed = run(script.replace(end, "\n".join([*more, end])), tmp_path, 2)
    assert printed.count("Report: K = 2 stages, M = 8 micro-batches") == 1
    assert (tmp_path / "step.html").read_text().startswith("<!doctype html>")
    model = GPipe(layers(), [3, 3], devices=["cpu"] * 2, chunks=8, schedule="1f1b")
    model.threads_per_stage = 1
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(10):
        x, y = torch.randn(32, 8), torch.randn(32, 1)
        optimizer.zero_grad()
        loss = model.step(x, target=y, loss_fn=F.mse_loss, optimizer=optimizer)
    # A line and its end are two writes, which those of the other process may come between.
    lines = re.findall(r"rank \d: \d\.\d{6}", printed)
    assert sorted(lines) == [f"rank {rank}: {loss.item():.6f}" for rank in range(2)]
    saved = [torch.load(tmp_path / f"stage{rank}.pt", weights_only=True) for rank in range(2)]
    whole = load_checkpoint(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal((saved[0] | saved[1])[name], tensor), name
        assert torch.equal(whole[name], tensor), name


@pytest.mark.extended
def test_replicas_in_four_processes_train_and_save(tmp_path: Path) -> None:
    script, _, replicas, *others = blocks(SEVERAL_MACHINES)
    checkpoint = next(block for block in others if "dcp.save(" in block)
    mesh, _, model, seed = replicas.splitlines()
    script = re.sub("^mesh = .*$", mesh, script, flags=re.MULTILINE)
    assert model in script
    script = script.replace(model, f"{model}\n{seed}")
    end = "dist.destroy_process_group()"
    printed = run(script.replace(end, f"rank = dist.get_rank()\n{checkpoint}{end}"), tmp_path, 4)
    lines = re.findall(r"rank (\d): (\d\.\d{6})", printed)
    assert sorted(rank for rank, _ in lines) == ["0", "1", "2", "3"]
    assert len({loss for _, loss in lines}) == 1
    assert all(tensor.any() for tensor in load_checkpoint(tmp_path).values())
