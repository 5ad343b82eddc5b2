"""The demo's checkpoint: training resumes bitwise, and checkpoints that do not match are rejected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.gpt import text as demo_text
from examples.gpt.__main__ import Training, load_checkpoint, resume_settings, save_checkpoint
from examples.gpt.text import Text
from tests.examples.gpt.tiny import MicroBatches, piped, press_ctrl_c, tiny, tiny_model, trained

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_resumed_run_has_the_losses_of_one_without_a_break(folder: Path, tmp_path: Path) -> None:
    """Training with dropout stops in step 4 of 12 and 5 steps later, and resumes with other balances."""
    args, text, path = (
        tiny("--steps", "12", "--dropout", "0.2"),
        demo_text.load(folder),
        tmp_path / "model.pt",
    )
    whole = trained(piped(args), args, text)
    for balance, stop in (([4], 4), ([1, 3], 5), ([2, 1, 1], 0)):
        training = Training(piped(args, balance), args)
        if path.exists():
            torch.manual_seed(99)
            training.load_state_dict(load_checkpoint(path, resume_settings(args, text)))
        press_ctrl_c(training.model, stop)
        training.run(text.training)
        save_checkpoint(path, training, resume_settings(args, text))
        assert training.losses == whole.losses[: len(training.losses)]
    assert len(training.losses) == 12
    for (name, a), b in zip(whole.model.named_parameters(), training.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert list(tmp_path.glob("*.unfinished")) == []


def test_a_checkpoint_is_loaded_by_a_plain_sequential(folder: Path, tmp_path: Path) -> None:
    args, text = tiny("--steps", "3"), demo_text.load(folder)
    training = trained(piped(args), args, text)
    save_checkpoint(tmp_path / "model.pt", training, resume_settings(args, text))
    state = torch.load(tmp_path / "model.pt")
    plain = tiny_model(tiny("--seed", "5"))
    plain.load_state_dict(state["model"])
    tokens = torch.randint(1, 256, (6, 16))
    with torch.no_grad():
        assert torch.equal(MicroBatches(plain, 3)(tokens), training.model.eval()(tokens))
    assert state["step"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--width", "32"], "with --width 16, not 32"),
        (["--lr", "1"], "with --lr 0.003, not 1.0"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    change: list[str], message: str, folder: Path, tmp_path: Path
) -> None:
    args, text, path = tiny("--steps", "3"), demo_text.load(folder), tmp_path / "model.pt"
    save_checkpoint(path, Training(tiny_model(args), args), resume_settings(args, text))
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path, resume_settings(tiny("--steps", "3", *change), text))
    with pytest.raises(ValueError, match="comes from a run on another text"):
        load_checkpoint(path, resume_settings(args, Text(text.training[1:], text.held_out)))
    load_checkpoint(path, resume_settings(args, text))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no checkpoint .*missing to resume from"):
        load_checkpoint(tmp_path / "missing", {})
    for name, content in (("text", "no checkpoint"), ("state", {"a": torch.ones(2)})):
        if isinstance(content, str):
            (tmp_path / name).write_text(content)
        else:
            torch.save(content, tmp_path / name)
        with pytest.raises(ValueError, match="is not a checkpoint of this demo"):
            load_checkpoint(tmp_path / name, {})
