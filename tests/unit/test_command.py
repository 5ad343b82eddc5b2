"""The command gpipe-fast: what it prints, as text and as JSON, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpipe_fast import simulate
from gpipe_fast.command import main
from gpipe_fast.schedule import one_f_one_b
from tests.programs import run_python

MAKES_A_MODEL = """
import torch
from torch import nn
from gpipe_fast import GPipe

def make():
    return GPipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), [1, 1], chunks=8), torch.ones(8, 4)

def with_loss():
    return (*make(), torch.zeros(8, 4), nn.functional.mse_loss)
"""


def test_simulations_are_those_of_the_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--schedule", "1f1b", "--forward", "1,2,1", "--backward=3", "--checkpoint", "never"]
    assert main(["simulate", "--stages=3", "--micro-batches=5", *options, "--json"]) == 0
    found = simulate("1f1b", 3, 5, forward=[1, 2, 1], backward=3, checkpoint="never")
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found.to_dict()))
    assert main(["simulate", "--stages=3", "--micro-batches=5", *options, "--draw"]) == 0
    assert capsys.readouterr().out == f"{found}\n\n{found.schedule}\n"
    file = tmp_path / "schedule.csv"
    file.write_text(one_f_one_b(2, 4).csv())
    assert main(["simulate", "--csv", str(file), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["stages"], read["microbatches"]) == (2, 4)


@pytest.mark.filterwarnings("ignore:.*stages idle")
def test_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "models.py", tmp_path / "step.html"
    file.write_text(MAKES_A_MODEL)
    assert main(["report", f"{file}:make", "--save", str(page)]) == 0
    assert capsys.readouterr().out.startswith("Report: K = 2 stages, M = 8 micro-batches: step ")
    assert page.read_text().startswith("<!doctype html>")
    assert main(["report", f"{file}:with_loss", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_microbatches"] == 8
    assert found["between"] == 0


def test_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["versions", "devices"]
    assert all(f"  {line}" in text for lines in found.values() for line in lines)


def test_mistakes_end_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    """tests/unit/test_messages.py has their texts."""
    for arguments, message in (
        ([], "the following arguments are required: COMMAND"),
        (["simulate", "--forward=a"], "argument --forward: expected numbers, such as 2 or 1,2.5, got"),
        (["simulate", "--csv", "missing.csv"], "No such file"),
        (["doctor", "--devices", "cpu"], "add --check"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("module", ["gpipe_fast", "gpipe_fast.doctor"])
def test_modules_that_run_the_command(module: str) -> None:
    run = run_python("-m", module, "--help")
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("usage: gpipe-fast")
    assert ("simulate" in run.stdout) == (module == "gpipe_fast")
