"""The script that getting_started.md shows for DistributedDataParallel trains in two processes."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

from tests.distributed.launch import run_as_torchrun
from tests.docs.markdown import ROOT

PAGE = ROOT / "docs" / "getting_started.md"


def test_the_script_trains_in_two_processes_and_saves_plain_keys(tmp_path: Path) -> None:
    script = re.search(
        r"This is\s+`train.py`:\n\n```text\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    assert script is not None
    (tmp_path / "train.py").write_text(script[1])
    assert "$ torchrun --nproc-per-node=2 train.py" in PAGE.read_text()
    run_as_torchrun(2, "train.py", cwd=tmp_path)
    plain = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    plain.load_state_dict(torch.load(tmp_path / "model.pt"))
