"""The migration example: both libraries train to the same numbers, and an old checkpoint loads."""

from __future__ import annotations

import sys

import pytest

import gpipe_fast
from examples.torchgpipe_migration import __main__ as example
from tests.examples.commands import ROOT, refusal, run

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = ["--steps=3", "--batch=16", "--width=8", "--rounds=2"]


def test_a_wrong_balance_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(example.parse_arguments, ["--balance", "4", "3"], capsys)
    assert "the model has 8 layers, but --balance sums to 7" in message


def test_without_torchgpipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchgpipe", None)  # the import raises ModuleNotFoundError
    with pytest.raises(SystemExit) as ended:
        example.main(TINY)
    assert ended.value.code == 2
    assert "pip install torchgpipe==0.0.7" in capsys.readouterr().err


@pytest.mark.sampled(1)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_both_libraries_give_the_same_numbers(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    torchgpipe = pytest.importorskip("torchgpipe")
    args = example.parse_arguments([*TINY, "--checkpoint", checkpoint, "--balance", "3", "2", "3"])
    theirs = example.training_script(torchgpipe.GPipe, args)
    ours = example.training_script(gpipe_fast.GPipe, args)
    assert theirs.losses[-1] != theirs.losses[0]
    example.compare_training(theirs, ours)
    example.load_checkpoint(theirs.model, gpipe_fast.GPipe, args)
    text = capsys.readouterr().out
    assert text.count("equal bit for bit") == 6
    assert "  torchgpipe's last key: partitions.2.7.bias; gpipe_fast's: 7.bias" in text.splitlines()


def test_a_difference_ends_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        example.training_script(gpipe_fast.GPipe, example.parse_arguments([*TINY, "--chunks", chunks]))
        for chunks in ("8", "1")
    )
    with pytest.raises(SystemExit) as ended:
        example.compare_training(first, second)
    assert ended.value.code == 1
    assert "NOT EQUAL" in capsys.readouterr().out


@pytest.mark.extended
@pytest.mark.parametrize("steps", ["--steps=2", "--steps=40"])
def test_the_quick_run_of_the_command(steps: str) -> None:
    pytest.importorskip("torchgpipe")
    output = run("torchgpipe_migration", "--quick", "--threads=2", steps, folder=ROOT)
    assert output.count(": equal bit for bit\n") == 6
    assert "  + from gpipe_fast import GPipe" in output
    assert "docs/coming_from/torchgpipe.md" in output.splitlines()[-1]
