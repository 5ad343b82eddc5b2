"""The demo's command: it trains, resumes bitwise after Ctrl-C, and rejects invalid arguments at the start."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch

from examples.gpt import __main__ as demo
from examples.gpt import text as demo_text
from examples.gpt.__main__ import Training, load_checkpoint, resume_settings, save_checkpoint
from examples.gpt.options import command_line, parse
from tests.examples.commands import ROOT, finish, refusal, run, start
from tests.examples.gpt.tiny import TINY, piped, press_ctrl_c, tiny, trained

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_command_from_beginning_to_end(folder: Path, tmp_path: Path) -> None:
    out = run("gpt", *TINY, "--steps", "8", "--text", str(folder), "--chunks", "9", folder=tmp_path)
    first, last = re.findall(r"^(?:first|last) held-out loss: ([0-9.]+) bits per byte$", out, re.M)
    assert float(last) < float(first)
    assert [line.split()[1] for line in out.splitlines() if line.startswith("  step ")] == [
        f"{step}/8:" for step in range(1, 9)
    ]
    assert "logits, loss and 29 gradients of a step equal those of the plain loop" in out
    assert "over the same 6 micro-batches, bit for bit" in out
    assert "stage 1 on cpu: block1, head; " in out
    assert re.search(r"^  stage 1 [.FRBIW0-5=]{96}$", out, re.MULTILINE)
    assert re.search(r"^  GPipe +1 thread +[0-9.]+ ms", out, re.MULTILINE)
    folder_of_results = tmp_path / "build" / "demo"
    assert len(torch.load(folder_of_results / "checkpoint.pt")["losses"]) == 8
    drawing = (folder_of_results / "step.svg").read_text(encoding="utf-8")
    assert "python -m examples.gpt: a GPT in 2 stages" in drawing
    assert "M = 6 micro-batches" in drawing
    check_what_to_look_at_next(out)


def check_what_to_look_at_next(out: str) -> None:
    """Checks the last lines: they name the drawing of this run, and files and options that exist."""
    assert out.splitlines()[-5] == "What to look at next:"
    named = [line.split(": ")[0].strip() for line in out.splitlines()[-4:]]
    assert named == [
        "build/demo/step.svg",
        "docs/getting_started.md",
        "examples/",
        "python -m examples.gpt --help",
    ]
    assert (ROOT / "docs" / "getting_started.md").exists()
    assert (ROOT / "examples" / "gpt" / "__main__.py").exists()
    assert "--full" in command_line().format_help()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", (250, 128, 300)),
        ("--quick", (30, 64, 100)),
        ("--full", (1200, 128, 300)),
        ("--quick --width 32 --steps 7", (7, 32, 100)),
        ("--full --sample 9", (1200, 128, 9)),
    ],
)
def test_the_presets_change_defaults_only(
    arguments: str, expected: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args = parse(arguments.split())
    assert (args.steps, args.width, args.sample) == expected


@pytest.mark.extended
def test_ctrl_c_and_resume_of_the_command(folder: Path, tmp_path: Path) -> None:
    """The losses up to Ctrl-C, and those of two further steps, equal the losses of an uninterrupted run."""
    arguments = [
        *TINY,
        "--chunks=9",  # no warning of few micro-batches
        "--steps=1000000",
        "--dropout=0.1",
        f"--text={folder}",
        "--save=model.pt",
    ]
    process = start("gpt", *arguments, folder=tmp_path)
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("  step "):
        assert line, "the demo ended before it started training"
    process.send_signal(signal.SIGINT)
    out = finish(process)
    args, text = tiny(*arguments), demo_text.load(folder)
    (steps,) = map(int, re.findall("interrupted after ([0-9]+) of 1000000 steps; continue with", out))
    model = piped(args)
    press_ctrl_c(model, steps + 2)
    losses = trained(model, args, text).losses
    goes_on = Training(piped(args), args)
    goes_on.load_state_dict(load_checkpoint(tmp_path / "model.pt", resume_settings(args, text)))
    assert goes_on.losses == losses[:steps]
    press_ctrl_c(goes_on.model, 2)
    goes_on.run(text.training)
    assert goes_on.losses == losses


@pytest.mark.extended
def test_the_command_resumes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [*TINY, "--steps", "5", "--text", str(folder)]
    demo.main(arguments)
    whole = torch.load("build/demo/checkpoint.pt")
    args, text = tiny(*arguments, "--stages", "2"), demo_text.load(folder)
    torch.manual_seed(args.seed)
    training = Training(piped(args), args)
    press_ctrl_c(training.model, 2)
    training.run(text.training)
    save_checkpoint(Path("part.pt"), training, resume_settings(args, text))
    demo.main([*arguments, "--save", "part.pt", "--resume"])
    resumed = torch.load("part.pt")
    assert resumed["losses"] == whole["losses"]
    for name, value in whole["model"].items():
        assert torch.equal(resumed["model"][name], value), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--stages 5", "cannot cut 4 layers (the embedding, 2 blocks, the head) into 5 stages"),
        ("--heads 3", "the width must be a multiple of the heads, got 16 and 3"),
        ("--dropout 1", "dropout must be at least 0 and below 1, got 1.0"),
        ("--steps 0", "argument --steps: must be at least 1, got 0"),
        ("--lr 0", "the learning rate must be positive, got 0.0"),
        ("--text missing", "there is no file or folder missing"),
        ("--text short", "the text is too short: its held-out part has 5 bytes, and a window needs 17"),
        ("--text nothing", "the text is too short: its training part has 0 bytes"),
        ("--save missing/model.pt", "there is no folder missing to save to"),
        ("--save nothing", "cannot save to the folder nothing"),
        ("--picture step.png", "--picture must end in .svg, got step.png"),
        ("--quick --full", "argument --full: not allowed with argument --quick"),
        ("--resume --save model.pt", "there is no checkpoint model.pt to resume from"),
    ],
)
def test_bad_arguments_are_refused_before_work_starts(
    arguments: str,
    message: str,
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "short").write_text("x" * 100)
    (tmp_path / "nothing").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "pipeline", None)
    assert message in refusal(demo.main, [*TINY, "--text", str(folder), *arguments.split()], capsys)
