"""The demo: what it reads, that it learns as a plain loop does, what it prints and what it refuses."""

import argparse
import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, demo, demo_text, keyed_rng
from gpipe_fast.demo_model import gpt

SIZES = {
    "width": 16,
    "layers": 2,
    "heads": 2,
    "length": 16,
    "batch": 6,
    "chunks": 3,
    "threads": 1,
    "sample": 20,
}
TINY = [f"--{name}={value}" for name, value in SIZES.items()]

pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(*more: str) -> argparse.Namespace:
    return demo._parser().parse_args([*TINY, *more])


def tiny_model(args: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(args.seed)
    return gpt(args.width, args.layers, args.heads, args.length, args.dropout)


def tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """45 files in two folders, the contents of all different; two files and a folder to leave out."""
    for i in range(45):
        file = tmp_path / "text" / ("ab"[i % 2]) / f"{i:02}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"def f%02d(x):\n    return x + %02d\n" % (i, i) * 4)
    (tmp_path / "text" / "a" / "00-binary").write_bytes(b"\0\1\2")
    (tmp_path / "text" / "a" / "00-empty").touch()
    (tmp_path / "text" / "tests").mkdir()
    (tmp_path / "text" / "tests" / "left_out.py").write_text("left out\n")
    return tmp_path / "text"


class MicroBatches(nn.Module):
    """What `GPipe` must equal: the plain model, one micro-batch after the other."""

    def __init__(self, layers: nn.Sequential, chunks: int) -> None:
        super().__init__()
        self.layers = layers
        self.chunks = chunks

    def forward(self, input: Tensor) -> Tensor:
        with keyed_rng(self.layers):
            return torch.cat([self.layers(c) for c in input.chunk(self.chunks)])


def test_whole_files_are_held_out_and_always_the_same(folder: Path) -> None:
    paths = demo_text.files(folder, "*")
    training, held_out = demo_text.split(paths, folder)
    assert sorted(training + held_out) == paths
    assert not set(training) & set(held_out)
    assert {p.parent.name for p in held_out} == {"b"}  # fewer than twenty entries: the last one
    assert demo_text.split(demo_text.files(folder, "*"), folder) == (training, held_out)
    text = demo_text.load(folder)
    assert bytes(text.held_out.tolist()) == b"\n".join(p.read_bytes() for p in held_out)
    assert b"left out" not in bytes(text.training.tolist())
    assert b"\0" not in bytes(text.training.tolist())
    assert len(text.training) == sum(len(c) + 1 for c in demo_text.read(training)) - 1


def test_the_standard_library_is_the_default() -> None:
    root = demo_text.standard_library()
    training, held_out = demo_text.split(demo_text.files(root, "*.py"), root)
    names = [p.name for p in training + held_out]
    assert {"argparse.py", "random.py", "decoder.py"} <= set(names)
    assert all(p.suffix == ".py" for p in training + held_out)
    parts = {part for p in training + held_out for part in p.parts}
    assert not parts & {"site-packages", "test", "tests"}
    # A package is held out whole.
    assert not {p.relative_to(root).parts[0] for p in training} & {
        p.relative_to(root).parts[0] for p in held_out
    }


def test_the_end_of_a_single_file_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(1, 101)))
    text = demo_text.load(tmp_path / "text")
    assert text.training.tolist() == list(range(1, 96))
    assert text.held_out.tolist() == list(range(96, 101))


def test_targets_are_the_bytes_that_follow() -> None:
    tokens, targets = demo_text.windows(tensor(b"abcdefgh"), torch.tensor([0, 4]), 3)
    assert [bytes(row) for row in tokens.tolist()] == [b"abc", b"efg"]
    assert [bytes(row) for row in targets.tolist()] == [b"bcd", b"fgh"]


def test_the_model_sees_only_the_past() -> None:
    model = tiny_model(tiny())
    tokens = torch.randint(1, 256, (1, 16))
    later = tokens.clone()
    later[:, 7:] = 0
    assert torch.equal(model(tokens)[:, :7], model(later)[:, :7])
    assert not torch.equal(model(tokens)[:, 7], model(later)[:, 7])


def test_the_held_out_loss_falls(folder: Path) -> None:
    args = tiny("--steps", "60", "--lr", "1e-2")
    text = demo_text.load(folder)
    model = GPipe(tiny_model(args), [2, 2], chunks=args.chunks)
    first = demo.held_out_loss(model, text.held_out, args)
    losses = demo.train(model, text.training, args)
    last = demo.held_out_loss(model, text.held_out, args)
    assert first == pytest.approx(8.0, abs=0.1)  # bits per byte: nothing is known
    assert last < 4.0
    assert len(losses) == 60
    assert demo.held_out_loss(model, text.held_out, args) == last


@pytest.mark.parametrize("dropout", ["0.0", "0.1"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_training_is_that_of_a_plain_loop_bit_for_bit(folder: Path, dropout: str, checkpoint: str) -> None:
    args = tiny("--steps", "3", "--dropout", dropout)
    text = demo_text.load(folder)
    layers = tiny_model(args)
    plain = MicroBatches(copy.deepcopy(layers), args.chunks)
    piped = GPipe(layers, [1, 2, 1], chunks=args.chunks, checkpoint=checkpoint)
    losses = []
    for model in (plain, piped):
        torch.manual_seed(1)
        losses.append(demo.train(model, text.training, args))
    assert losses[0] == losses[1]
    for (name, a), b in zip(plain.layers.named_parameters(), piped.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_interrupted_training_returns_the_steps_that_finished(folder: Path) -> None:
    class Interrupted(MicroBatches):
        calls = 0

        def forward(self, input: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt
            return super().forward(input)

    args = tiny("--steps", "5")
    model = Interrupted(tiny_model(args), args.chunks)
    assert len(demo.train(model, demo_text.load(folder).training, args)) == 2


def test_a_sample_continues_the_prompt_past_the_window() -> None:
    args = tiny()
    layers = tiny_model(args)
    written = demo.generate(GPipe(layers, [2, 2]), b"def ", 30, args.length, seed=0)
    assert len(written) == 34 > args.length
    assert written.startswith(b"def ")
    assert written == demo.generate(layers, b"def ", 30, args.length, seed=0)
    assert written != demo.generate(layers, b"def ", 30, args.length, seed=1)


def test_the_command_prints_both_losses_and_a_sample_and_saves(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "model.pt"
    arguments = [*TINY, "--steps", "8", "--text", str(folder), "--save", str(saved), "--chunks", "9"]
    result = subprocess.run(
        [sys.executable, "-m", "gpipe_fast.demo", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    first, last = re.findall(r"^(?:first|last) held-out loss: ([0-9.]+) bits per byte$", result.stdout, re.M)
    assert float(last) < float(first)
    assert "a mini-batch of 6 makes 6 micro-batches, not 9" in result.stdout
    assert "sample:\n" in result.stdout
    assert "\ndef " in result.stdout
    assert f"checkpoint: {saved}" in result.stdout
    assert "loss " in result.stderr
    model = tiny_model(tiny())
    before = copy.deepcopy(model.state_dict())
    model.load_state_dict(torch.load(saved))
    assert any(not torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_the_readme_runs() -> None:
    readme = Path(__file__).parents[1] / "README.md"
    snippets = re.findall(r"^```python\n(.*?)^```$", readme.read_text(encoding="utf-8"), re.M | re.S)
    assert len(snippets) == 2
    for snippet in snippets:
        exec(compile(snippet, str(readme), "exec"), {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--stages 5", "cannot cut 4 layers (the embedding, 2 blocks, the head) into 5 stages"),
        ("--heads 3", "the width must be a multiple of the heads, got 16 and 3"),
        ("--dropout 1", "dropout must be at least 0 and below 1, got 1.0"),
        ("--steps 0", "argument --steps: must be at least 1, got 0"),
        ("--lr 0", "the learning rate must be positive, got 0.0"),
        ("--checkpoint often", "argument --checkpoint: invalid choice: 'often'"),
        ("--text missing", "there is no file or folder missing"),
        ("--text short", "the text is too short: its held-out part has 5 bytes, and a window takes 17"),
        ("--text nothing", "the text is too short: its training part has 0 bytes"),
        ("--save missing/model.pt", "there is no folder missing to save to"),
        ("--save nothing", "cannot save to the folder nothing"),
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
    monkeypatch.setattr(demo, "train", None)
    with pytest.raises(SystemExit) as refused:
        demo.main([*TINY, "--text", str(folder), *arguments.split()])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err
