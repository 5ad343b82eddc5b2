"""The demo: what it reads, that it learns as a plain loop does, what it prints and what it refuses."""

import argparse
import copy
import itertools
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from examples.gpt import __main__ as demo
from examples.gpt import text as demo_text
from examples.gpt import train as demo_train
from examples.gpt.checkpoint import load_checkpoint, save_checkpoint, settings_of
from examples.gpt.model import gpt
from examples.gpt.report import PlainLoop, compare, saved_bytes
from examples.gpt.text import Text
from examples.gpt.train import Training, generate, held_out_loss
from gpipe_fast import GPipe, keyed_rng
from gpipe_fast._extension import kept_bytes
from gpipe_fast.inspect.verify import Report, Row

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


def piped(args: argparse.Namespace, balance: Sequence[int] = (2, 2)) -> GPipe:
    return GPipe(tiny_model(args), balance, chunks=args.chunks, checkpoint=args.checkpoint)


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


def trained(model: nn.Module, args: argparse.Namespace, text: Text) -> Training:
    training = Training(model, args)
    training.run(text.training)
    return training


def test_the_held_out_loss_falls(folder: Path) -> None:
    args = tiny("--steps", "60", "--lr", "1e-2")
    text = demo_text.load(folder)
    model = piped(args)
    first = held_out_loss(model, text.held_out, args)
    losses = trained(model, args, text).losses
    last = held_out_loss(model, text.held_out, args)
    assert first == pytest.approx(8.0, abs=0.1)  # bits per byte: nothing is known
    assert last < 4.0
    assert len(losses) == 60
    assert held_out_loss(model, text.held_out, args) == last


def test_the_held_out_loss_is_the_mean_over_all_windows(folder: Path) -> None:
    text, args = demo_text.load(folder).held_out, tiny()
    model = tiny_model(args)
    starts = demo_text.spread(text, demo_train.HELD_OUT_WINDOWS, args.length)
    tokens, targets = demo_text.windows(text, starts, args.length)
    nats = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    assert held_out_loss(model, text, args) == pytest.approx(nats.item() / math.log(2), rel=1e-5)


@pytest.mark.parametrize("dropout", ["0.0", "0.1"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_training_is_that_of_a_plain_loop_bit_for_bit(folder: Path, dropout: str, checkpoint: str) -> None:
    """Over more steps than one is recorded."""
    args = tiny("--steps", "3", "--dropout", dropout)
    text = demo_text.load(folder)
    layers = tiny_model(args)
    plain = MicroBatches(copy.deepcopy(layers), args.chunks)
    pipe = GPipe(layers, [1, 2, 1], chunks=args.chunks, checkpoint=checkpoint)
    losses = []
    for model in (plain, pipe):
        torch.manual_seed(1)
        losses.append(trained(model, args, text).losses)
    assert losses[0] == losses[1]
    for (name, a), b in zip(plain.layers.named_parameters(), pipe.parameters(), strict=True):
        assert torch.equal(a, b), name


def press_ctrl_c(model: nn.Module, step: int, times: int = 1) -> None:
    """In the middle of this step, counted from 1."""
    steps = itertools.count(1)

    def press(*_: object) -> None:
        if next(steps) == step:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    model.register_forward_pre_hook(press)


def test_ctrl_c_lets_the_step_end(folder: Path) -> None:
    args, text, before = tiny("--steps", "5"), demo_text.load(folder), signal.getsignal(signal.SIGINT)
    whole = trained(piped(args), args, text)
    model = piped(args)
    press_ctrl_c(model, step=3)
    assert trained(model, args, text).losses == whole.losses[:3]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_leaves_at_once(folder: Path) -> None:
    args, before = tiny("--steps", "5"), signal.getsignal(signal.SIGINT)
    model = piped(args)
    press_ctrl_c(model, step=3, times=2)
    training = Training(model, args)
    with pytest.raises(KeyboardInterrupt):
        training.run(demo_text.load(folder).training)
    assert len(training.losses) == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_a_resumed_run_has_the_losses_of_one_without_a_break(folder: Path, tmp_path: Path) -> None:
    """Stopped in step 4 of 12, and 5 steps later; with dropout, and other numbers of stages."""
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
            training.load_state_dict(load_checkpoint(path, settings_of(args, text)))
        press_ctrl_c(training.model, stop)
        training.run(text.training)
        save_checkpoint(path, training, settings_of(args, text))
        assert training.losses == whole.losses[: len(training.losses)]
    assert len(training.losses) == 12
    for (name, a), b in zip(whole.model.named_parameters(), training.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert list(tmp_path.glob("*.unfinished")) == []


def test_a_checkpoint_is_loaded_by_a_plain_sequential(folder: Path, tmp_path: Path) -> None:
    args, text = tiny("--steps", "3"), demo_text.load(folder)
    training = trained(piped(args), args, text)
    save_checkpoint(tmp_path / "model.pt", training, settings_of(args, text))
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
        (["--steps", "4"], "with --steps 3, not 4"),
        (["--chunks", "2"], "with --chunks 3, not 2"),
        (["--lr", "1"], "with --lr 0.003, not 1.0"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    change: list[str], message: str, folder: Path, tmp_path: Path
) -> None:
    args, text, path = tiny("--steps", "3"), demo_text.load(folder), tmp_path / "model.pt"
    save_checkpoint(path, Training(tiny_model(args), args), settings_of(args, text))
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path, settings_of(tiny("--steps", "3", *change), text))
    with pytest.raises(ValueError, match="of a run on another text"):
        load_checkpoint(path, settings_of(args, Text(text.training[1:], text.held_out)))
    load_checkpoint(path, settings_of(args, text))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no checkpoint .*missing to go on from"):
        load_checkpoint(tmp_path / "missing", {})
    for name, content in (("text", "no checkpoint"), ("state", {"a": torch.ones(2)})):
        if isinstance(content, str):
            (tmp_path / name).write_text(content)
        else:
            torch.save(content, tmp_path / name)
        with pytest.raises(ValueError, match="is no checkpoint of this demo"):
            load_checkpoint(tmp_path / name, {})


def test_a_sample_continues_the_prompt_past_the_window() -> None:
    args = tiny()
    layers = tiny_model(args)
    written = generate(GPipe(layers, [2, 2]), b"def ", 30, args.length, seed=0)
    assert len(written) == 34 > args.length
    assert written.startswith(b"def ")
    assert written == generate(layers, b"def ", 30, args.length, seed=0)
    assert written != generate(layers, b"def ", 30, args.length, seed=1)


class Successor(nn.Module):
    """Knows the alphabet by heart."""

    def forward(self, tokens: Tensor) -> Tensor:
        return 1e4 * nn.functional.one_hot(tokens + 1, 256)


def test_a_sample_goes_on_from_its_last_bytes() -> None:
    assert generate(Successor(), b"a", 25, 8, seed=0) == bytes(range(ord("a"), ord("z") + 1))


def test_the_first_line_is_that_all_is_equal() -> None:
    model = piped(tiny("--dropout", "0.1"))
    tokens, targets = torch.randint(256, (2, 6, 16))
    assert demo.check_equality(model, tokens, targets, 3) == "equal bit for bit to the plain loop: 31 tensors"
    with mock.patch.object(demo, "verify", return_value=Report((Row("loss", False, 0.5, 0.25),), 2)):
        lines = demo.check_equality(model, tokens, targets, 3).splitlines()
    assert lines[0] == "1 of 1 tensors differ from the plain loop's"
    assert lines[-1].split() == ["loss", "NO", "0.5", "0.25"]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_the_plain_loop_of_the_table_computes_the_same(checkpoint: str, dropout: float) -> None:
    args = tiny("--dropout", str(dropout), "--checkpoint", checkpoint)
    pipe, tokens = piped(args, [1, 2, 1]), torch.randint(256, (6, 16))
    plain = PlainLoop(pipe, 3, args.dropout > 0)
    assert [len(partition) for partition in plain.partitions] == pipe.balance  # type: ignore[arg-type]
    gradients = []
    for model in (pipe.eval(), plain.eval()):
        pipe.zero_grad()
        model(tokens).square().sum().backward()
        gradients.append([p.grad for p in pipe.parameters()])
    assert all(map(torch.equal, *gradients))


def test_both_keep_the_same_when_everything_is_recomputed() -> None:
    """Boundary activations, of 6 x 16 tokens: the tokens themselves, and vectors of 16 floats."""
    args = tiny("--checkpoint", "always")
    pipe, tokens = piped(args, [1, 2, 1]), torch.randint(256, (6, 16))
    expected = 6 * 16 * (8 + 2 * 16 * 4)
    assert saved_bytes(PlainLoop(pipe, 3, False), tokens) == kept_bytes(pipe(tokens)) == expected
    pipe.checkpoint = "never"
    assert saved_bytes(PlainLoop(pipe, 3, False), tokens) > 5 * expected


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


def test_what_autograd_keeps_is_counted_once_and_without_parameters() -> None:
    """The input, for the weight, and what is multiplied with itself: 3 x 4 floats each."""
    model = nn.Sequential(nn.Linear(4, 4), Square())
    assert saved_bytes(model, torch.randn(3, 4, requires_grad=True)) == 2 * 3 * 4 * 4


def test_the_table_compares_both() -> None:
    args = tiny()
    pipe = piped(args)
    tokens, targets = torch.randint(256, (2, 6, 16))
    before = copy.deepcopy(pipe.state_dict())
    _, _, *rows, note = compare(pipe, tokens, targets, args).splitlines()
    assert note.startswith("kept: by all micro-batches when the forward ends")
    names = [row[: len("plain loop with checkpointing")].strip() for row in rows]
    assert names == ["plain loop with checkpointing", "GPipe"]
    (plain, _, kept, one), (ours, rate, ours_kept, ratio) = (map(float, row.split()[-4:]) for row in rows)
    assert one == 1.0
    assert ratio == pytest.approx(plain / ours, abs=0.2)
    assert rate == pytest.approx(6000 / ours, rel=0.1)
    assert 0 < ours_kept <= kept
    assert all(torch.equal(before[name], value) for name, value in pipe.state_dict().items())


def run(arguments: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "examples.gpt", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def test_the_command_from_beginning_to_end(folder: Path, tmp_path: Path) -> None:
    process = run([*TINY, "--steps", "8", "--text", str(folder), "--chunks", "9"], tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    first, last = re.findall(r"^(?:first|last) held-out loss: ([0-9.]+) bits per byte$", out, re.M)
    assert float(last) < float(first)
    assert "\nequal bit for bit to the plain loop: 31 tensors\n" in out
    assert "a mini-batch of 6 makes 6 micro-batches, not 9" in out
    assert "interrupted" not in out
    assert "sample:\n" in out
    assert "\ndef " in out
    assert re.search(r"^plain loop with checkpointing +[0-9.]+", out, re.M)
    assert re.search(r"^GPipe +[0-9.]+", out, re.M)
    assert re.search(r"loss [0-9.]+ bits per byte, bubble [0-9.]+%", err)
    checkpoint = tmp_path / re.findall("^checkpoint: ([^ ]+)", out, re.M)[0]
    drawing = tmp_path / re.findall("^picture of a step: (.+)", out, re.M)[0]
    assert checkpoint == tmp_path / "build" / "demo" / "checkpoint.pt"
    assert len(torch.load(checkpoint)["losses"]) == 8
    assert "M = 6 micro-batches" in drawing.read_text(encoding="utf-8")


def test_ctrl_c_and_resume_of_the_command(folder: Path, tmp_path: Path) -> None:
    """However far it came, it has the losses of a run without a break, and so have the next two steps."""
    arguments = [*TINY, "--steps", "1000000", "--text", str(folder), "--dropout", "0.1", "--save", "model.pt"]
    process = run(arguments, tmp_path)
    assert process.stderr is not None
    while (letter := process.stderr.read(1)) != "%":  # the bar is there
        assert letter, "it ended before it trained"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    args, text = tiny(*arguments), demo_text.load(folder)
    (steps,) = map(int, re.findall("interrupted after ([0-9]+) of 1000000 steps; --resume goes on", out))
    assert "last held-out loss" in out
    assert "picture" not in out
    model = piped(args)
    press_ctrl_c(model, steps + 2)
    losses = trained(model, args, text).losses
    goes_on = Training(piped(args), args)
    goes_on.load_state_dict(load_checkpoint(tmp_path / "model.pt", settings_of(args, text)))
    assert goes_on.losses == losses[:steps]
    press_ctrl_c(goes_on.model, 2)
    goes_on.run(text.training)
    assert goes_on.losses == losses


def test_the_command_resumes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [*TINY, "--steps", "5", "--text", str(folder)]
    demo.main(arguments)
    whole = torch.load("build/demo/checkpoint.pt")
    args, text = tiny(*arguments, "--stages", "2"), demo_text.load(folder)
    torch.manual_seed(args.seed)
    training = Training(piped(args), args)
    press_ctrl_c(training.model, 2)
    training.run(text.training)
    save_checkpoint(Path("part.pt"), training, settings_of(args, text))
    capsys.readouterr()
    demo.main([*arguments, "--save", "part.pt", "--resume", "--picture", "other.svg"])
    assert "going on after 2 of 5 steps" in capsys.readouterr().out
    assert torch.load("part.pt")["losses"] == whole["losses"]
    assert Path("other.svg").is_file()


@pytest.mark.parametrize(
    ("cores", "layers", "batch", "expected"),
    [(1, 4, 64, (2, 8)), (2, 4, 64, (2, 8)), (3, 4, 64, (3, 12)), (64, 4, 64, (4, 16)), (64, 1, 7, (3, 7))],
)
def test_stages_and_micro_batches_suit_the_machine(
    cores: int, layers: int, batch: int, expected: tuple[int, int], folder: Path, tmp_path: Path
) -> None:
    sizes = [f"--layers={layers}", f"--batch={batch}", "--length=16"]
    files = [f"--save={tmp_path}/c", f"--picture={tmp_path}/p", f"--text={folder}"]
    with mock.patch.object(demo, "_cores", return_value=cores):
        args, _, _ = demo._settle([*sizes, *files])
        assert (args.stages, args.chunks) == expected
        args, _, _ = demo._settle([*sizes, *files, "--stages=1", "--chunks=5"])
        assert (args.stages, args.chunks) == (1, 5)


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
        ("--picture missing/step.svg", "there is no folder missing to save to"),
        ("--chunks none", "argument --chunks: invalid"),
        ("--stages 0", "argument --stages: must be at least 1, got 0"),
        ("--resume --save model.pt", "there is no checkpoint model.pt to go on from"),
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
    monkeypatch.setattr(demo, "Training", None)
    with pytest.raises(SystemExit) as refused:
        demo.main([*TINY, "--text", str(folder), *arguments.split()])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err
