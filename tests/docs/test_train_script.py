"""The script that getting_started.md shows for DistributedDataParallel trains in two processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from tests.docs.markdown import ROOT

PAGE = ROOT / "docs" / "getting_started.md"


def test_the_script_trains_in_two_processes_and_saves_plain_keys(tmp_path: Path) -> None:
    script = re.search(
        r"This is\s+`train.py`:\n\n```text\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    assert script is not None
    (tmp_path / "train.py").write_text(script[1])
    assert "$ torchrun --nproc-per-node=2 train.py" in PAGE.read_text()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",  # the machine's name may have no address
        "--nproc-per-node=2",
        "train.py",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    plain = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    plain.load_state_dict(torch.load(tmp_path / "model.pt"))
