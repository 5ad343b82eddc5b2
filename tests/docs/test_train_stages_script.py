"""The scripts of docs/guide/several_machines.md train and save in two processes."""

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

PAGE = ROOT / "docs" / "guide" / "several_machines.md"


def blocks() -> list[str]:
    found = re.findall(r"^( *)```text\n(.*?)^\1```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in found]


def run(script: str, folder: Path, processes: int = 2) -> str:
    (folder / "train_stages.py").write_text(script)
    return run_as_torchrun(processes, "train_stages.py", cwd=folder)


def trained_alone() -> tuple[nn.Module, torch.Tensor]:
    """Trains the model of the page in one process."""
    torch.manual_seed(0)
    hidden = nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU()
    model = GPipe(
        nn.Sequential(*hidden, nn.Linear(32, 1)), [3, 3], devices=["cpu"] * 2, chunks=8, schedule="1f1b"
    )
    model.threads_per_stage = 1
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(10):
        x, y = torch.randn(32, 8), torch.randn(32, 1)
        optimizer.zero_grad()
        loss = model.step(x, target=y, loss_fn=F.mse_loss, optimizer=optimizer)
    return model, loss


def replicas_trained_alone() -> tuple[nn.Module, torch.Tensor]:
    """Trains the model of the page on the samples of two replicas, with their seeds."""
    torch.manual_seed(0)
    hidden = nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU()
    model = GPipe(
        nn.Sequential(*hidden, nn.Linear(32, 1)), [3, 3], devices=["cpu"] * 2, chunks=8, schedule="1f1b"
    )
    model.threads_per_stage = 1
    optimizer = torch.optim.AdamW(model.parameters())
    generators = []
    for replica in range(2):
        torch.manual_seed(1 + replica)
        generators.append(torch.get_rng_state())
    for _ in range(10):
        losses, gradients = [], []
        for replica in range(2):
            torch.set_rng_state(generators[replica])
            x, y = torch.randn(32, 8), torch.randn(32, 1)
            optimizer.zero_grad()
            losses.append(
                model.step(x, target=y, loss_fn=nn.MSELoss(reduction="sum"), normalizer=2 * y.numel())
            )
            gradients.append([p.grad for p in model.parameters()])
            generators[replica] = torch.get_rng_state()
        for parameter, first, second in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = first + second
        optimizer.step()
    return model, losses[0] + losses[1]


def test_the_script_trains_as_one_process_does(tmp_path: Path) -> None:
    script, two_lines, *others = blocks()
    checkpoint = next(block for block in others if "dcp.save(" in block)
    assert "$ torchrun --nproc-per-node=2 train_stages.py" in PAGE.read_text()
    assert "output = model(x)" in two_lines
    assert "dcp.save(" in checkpoint
    report = next(block for block in others if "model.report(" in block)
    more = ["rank, last = dist.get_rank(), dist.get_world_size() - 1", two_lines, report, checkpoint]
    before_the_end = script.index("dist.destroy_process_group()")
    printed = run(script[:before_the_end] + "\n".join(more) + script[before_the_end:], tmp_path)
    model, loss = trained_alone()
    # A line and its end are two writes, which those of the other process may come between.
    assert printed.count("Report: K = 2 stages, M = 8 micro-batches") == 1
    assert (tmp_path / "step.html").read_text().startswith("<!doctype html>")
    lines = re.findall(r"rank \d: \d\.\d{6}", printed)
    assert sorted(lines) == [f"rank {rank}: {loss.item():.6f}" for rank in range(2)]
    saved = {}
    for rank in range(2):
        saved |= torch.load(tmp_path / f"stage{rank}.pt", weights_only=True)
    assert {name: tensor.tolist() for name, tensor in saved.items()} == {
        name: tensor.tolist() for name, tensor in model.state_dict().items()
    }
    # Processes in any number, such as this one, can read what two have written.
    whole = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    dcp.load({"model": whole}, checkpoint_id=tmp_path / "checkpoints" / "10", no_dist=True)
    assert all(torch.equal(whole[name], tensor) for name, tensor in saved.items())


@pytest.mark.extended
def test_the_script_trains_replicas(tmp_path: Path) -> None:
    """It gives the weights of one process that adds up the gradients of both replicas."""
    script, _, replicas, *others = blocks()
    checkpoint = next(block for block in others if "dcp.save(" in block)
    mesh, _, model, seed = replicas.splitlines()
    script = re.sub("^mesh = .*$", mesh, script, flags=re.MULTILINE)
    assert model in script
    script = script.replace(model, f"{model}\n{seed}")
    before_the_end = script.index("dist.destroy_process_group()")
    more = "rank = dist.get_rank()\n" + checkpoint
    printed = run(script[:before_the_end] + more + script[before_the_end:], tmp_path, processes=4)
    lines = re.findall(r"rank (\d): (\d\.\d{6})", printed)
    assert sorted(rank for rank, _ in lines) == ["0", "1", "2", "3"]
    trained, loss = replicas_trained_alone()
    assert [float(text) for _, text in lines] == pytest.approx([loss.item()] * 4, abs=2e-6)
    saved = {name: torch.zeros_like(tensor) for name, tensor in trained.state_dict().items()}
    dcp.load({"model": saved}, checkpoint_id=tmp_path / "checkpoints" / "10", no_dist=True)
    for name, tensor in trained.state_dict().items():
        assert torch.equal(saved[name], tensor), name
