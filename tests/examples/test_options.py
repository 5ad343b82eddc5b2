"""The options that the examples share have one meaning: in the help, and in what the stages do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_fast import GPipe
from tests.examples.commands import ROOT, help_of, import_example

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLES = sorted(path.parent.name for path in (ROOT / "examples").glob("*/__main__.py"))
# The beginnings of the help texts.
SHARED = {
    "steps": "training steps, each on one mini-batch",
    "chunks": "micro-batches per mini-batch",
    "checkpoint": "which micro-batches recompute",
    "batch": "(windows|images|samples) per mini-batch",
    "seed": "random seed of",
    "threads": r"threads of all stages together, divided evenly \(default: 1\)",
    "quick": "",
}
# Arguments for two stages.
TWO_STAGES = {
    "gpt": ["--stages=2"],
    "resnet": ["--balance", "9", "9"],
    "torchgpipe_migration": ["--steps=1"],
    "transformers_from_model": ["--stages=2"],
    "transformers_gpt2": ["--stages=2"],
    "transformers_llama": ["--stages=2"],
    "unet": ["--balance", "4", "4"],
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_shared_options_have_the_same_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(import_example(name), capsys)
    for option, meaning in SHARED.items():
        assert re.search(rf" --{option} ([A-Z]+ |{{[^}}]*}} )?{meaning}", text), option
    assert "(default: None)" not in text


class FirstCallError(Exception):
    pass


@pytest.mark.parametrize("name", EXAMPLES)
def test_threads_are_divided_among_the_stages(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven threads are three for each of two stages, as a pipeline finds at its first call."""
    if name == "torchgpipe_migration":
        pytest.importorskip("torchgpipe")
    example = import_example(name)

    def forward(self: GPipe, *_: Any) -> None:
        assert len(self.balance) == 2
        raise FirstCallError(self.threads_per_stage or torch.get_num_threads() // 2)

    monkeypatch.setattr(GPipe, "forward", forward)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FirstCallError, match=r"^3$"):
        example.main(["--quick", "--threads=7", *TWO_STAGES[name]])
