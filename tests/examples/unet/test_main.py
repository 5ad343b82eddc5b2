"""The U-Net example: its stages compute what the plain U-Net computes; skips bypass stages between."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from examples.unet import __main__ as example
from gpipe_fast import GPipe
from tests.examples.commands import ROOT, refusal, run

pytestmark = pytest.mark.usefixtures("one_thread")


def make(balance: Sequence[int], checkpoint: str = "except_last") -> GPipe:
    torch.manual_seed(0)
    devices = ["cpu"] * len(balance)
    return GPipe(example.unet(4), balance, devices=devices, chunks=3, checkpoint=checkpoint)


def shapes() -> tuple[tuple[Tensor, ...], Tensor]:
    images, classes = example.drawn_shapes(6, 16, torch.Generator().manual_seed(0))
    return images.chunk(3), classes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--chunks 0", "argument --chunks: must be at least 1, got 0"),
        ("--balance 4 3", "the model has 8 layers, but --balance sums to 7: [4, 3]"),
        ("--size 20", "--size must be a multiple of 8 and --width of 4, got 20 and 16"),
        ("--width 6", "--size must be a multiple of 8 and --width of 4, got 64 and 6"),
    ],
)
def test_bad_arguments_are_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(example.parse_arguments, arguments.split(), capsys)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("balance", [[8], [2, 3, 3], [1] * 8], ids=len)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_step_equals_the_plain_unet(
    balance: list[int], checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    example.compare_a_step(make(balance, checkpoint), example.PlainUNet(4), *shapes())
    text = capsys.readouterr().out
    assert text.count("equal bit for bit") == 3
    assert "  58 gradients: equal bit for bit" in text


def test_a_difference_ends_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    class SwappedSkips(example.PlainUNet):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flip(3)).flip(3)

    with pytest.raises(SystemExit) as ended:
        example.compare_a_step(make([2, 3, 3]), SwappedSkips(4), *shapes())
    assert ended.value.code == 1
    assert "NOT EQUAL" in capsys.readouterr().out


def test_skip_connections_bypass_the_stages_between(capsys: pytest.CaptureFixture[str]) -> None:
    model = make([1, 1, 1, 1, 1, 1, 1, 1])
    model(torch.cat(shapes()[0]))
    example.print_connections(model)
    found = re.findall(r"^  stage (\d) \(cpu\) -> stage (\d) \(cpu\), skip", capsys.readouterr().out, re.M)
    assert sorted(found) == [("0", "6"), ("1", "5"), ("2", "4")]


def test_the_iou_of_known_predictions() -> None:
    images, classes = example.drawn_shapes(6, 16, torch.Generator().manual_seed(0))

    class Answers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            predicted = classes.clone()
            predicted[classes == 2] = 1  # takes all squares for discs
            return nn.functional.one_hot(predicted, 3).movedim(3, 1)

    discs, squares = (classes == 1).sum(), (classes == 2).sum()
    disc_iou = discs / (discs + squares)
    assert example.ious(Answers(), (images, classes), 6) == (
        f"background 1.00, disc {disc_iou:.2f}, square 0.00"
    )


def run_and_check(*arguments: str) -> str:
    """Runs the command with three stages of one thread; returns its output."""
    output = run("unet", "--quick", "--threads=3", *arguments, folder=ROOT)
    assert len(re.findall(r"^  .*: equal bit for bit$", output, re.M)) == 3
    assert "stage 0 (cpu) -> stage 2 (cpu), skip connection" in output
    assert "docs/guide/skip_connections.md" in output.splitlines()[-1]
    return output


@pytest.mark.extended
def test_the_command_with_one_step() -> None:
    run_and_check("--steps=1")


@pytest.mark.extended
def test_the_quick_run_learns() -> None:
    lines = re.findall(r"background [0-9.]+, disc ([0-9.]+), square ([0-9.]+)$", run_and_check(), re.M)
    before, after = lines[0], lines[-1]
    assert all(float(a) > 0.5 > float(b) for a, b in zip(after, before, strict=True))
