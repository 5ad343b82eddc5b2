"""The ResNet example: its layers are torchvision's model, and it says truly what equals the plain model."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence

import pytest
import torch

from gpipe_fast import GPipe
from tests.examples.commands import ROOT, import_example, refusal, run

example = import_example("resnet")  # or skips this file where torchvision does not load

from torchvision.models.resnet import Bottleneck, ResNet  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = ["--size=32", "--width=4", "--batch=16", "--chunks=2", "--balance", "9", "9"]
STATEMENTS = [
    "  the loss and the loop's loss: equal bit for bit",
    "  161 gradients and the loop's gradients: equal bit for bit",
    "  updates of the running statistics: 1 (deferred_batch_norm=True); loop: {}; whole mini-batch: 1",
    "  the logits and those of the plain loop over micro-batches: equal bit for bit",
]


def tiny_resnet(blocks: Sequence[int] = (3, 4, 6, 3)) -> ResNet:
    torch.manual_seed(0)
    return ResNet(Bottleneck, list(blocks), example.CLASSES, width_per_group=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 0", "argument --steps: must be at least 1, got 0"),
        ("--balance 9 8", "the model has 18 layers, but --balance sums to 17"),
        ("--size 32 --batch 9", "batch norm needs two values"),
        ("--stages 19", "cannot cut 18 layers into 19 stages"),
    ],
)
def test_bad_arguments_are_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(example.parse_arguments, arguments.split(), capsys)


def test_quick_sets_defaults_only() -> None:
    args = example.parse_arguments(["--quick", "--steps", "3"])
    assert (args.steps, args.size, args.width) == (3, 32, 16)
    assert example.parse_arguments([]).width == 64


def test_the_sequential_is_the_torchvision_model() -> None:
    plain = tiny_resnet().eval()
    layers = example.as_sequential(plain)
    names = example.with_torchvision_names(layers.state_dict())
    assert list(names) == list(plain.state_dict())
    images, _ = example.striped_images(4, 32, torch.Generator().manual_seed(0))
    assert torch.equal(layers(images), plain(images))


def test_the_classes_of_the_images_differ_in_direction_and_colour() -> None:
    images, labels = example.striped_images(64, 32, torch.Generator().manual_seed(0))
    again, _ = example.striped_images(64, 32, torch.Generator().manual_seed(0))
    assert torch.equal(images, again)
    assert set(labels.tolist()) == set(range(example.CLASSES))
    vertical = images.mean(dim=2).var(dim=2).sum(dim=1) > images.mean(dim=3).var(dim=2).sum(dim=1)
    assert torch.equal(vertical, labels % 2 == 1)


def test_a_difference_ends_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    """The comparison notices that one of all weights has changed."""
    plain = tiny_resnet(blocks=(1, 1, 1, 1))
    model = GPipe(example.as_sequential(copy.deepcopy(plain)), [3, 3], devices=["cpu"] * 2, chunks=2)
    images, labels = example.striped_images(16, 32, torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain.get_parameter("layer3.0.conv2.weight")[0, 0, 1, 1] += 1e-3
    with pytest.raises(SystemExit) as ended:
        example.compare_a_step(model, plain, images.chunk(2), labels)
    assert ended.value.code == 1
    assert "NOT EQUAL" in capsys.readouterr().out


@pytest.mark.extended
def test_a_tiny_run(capsys: pytest.CaptureFixture[str]) -> None:
    example.main([*TINY, "--steps", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in (s.format(2) for s in STATEMENTS) if line not in lines] == []
    assert "  stage 1 on cpu: layer3_1 to head" in lines


def run_and_check(*arguments: str) -> str:
    """Runs the command with two stages of one thread; returns its output."""
    output = run("resnet", "--quick", "--threads=2", *arguments, folder=ROOT)
    lines = output.splitlines()
    assert [line for line in (s.format(8) for s in STATEMENTS) if line not in lines] == []
    assert "docs/guide/batch_norm.md" in lines[-1]
    return output


@pytest.mark.extended
def test_the_command_with_one_step() -> None:
    run_and_check("--steps=1")


@pytest.mark.extended
def test_the_quick_run_learns() -> None:
    output = run_and_check()
    (before,) = map(float, re.findall(r"^  before: ([0-9.]+)%$", output, re.M))
    *_, after = map(float, re.findall(r", accuracy ([0-9.]+)%$", output, re.M))
    assert before < 50 < after
