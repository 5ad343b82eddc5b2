"""The README's examples run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.filterwarnings("ignore:.*micro-batches on:UserWarning")
def test_readme_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 4
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, README.name, "exec"), names)
    assert names["model"](torch.randn(16, 8)).shape[0] == 16
