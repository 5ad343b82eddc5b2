"""The demo's training: equals a plain loop bit for bit, and stops on Ctrl-C at the end of a step."""

from __future__ import annotations

import copy
import math
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from examples.gpt import text as demo_text
from examples.gpt.__main__ import HELD_OUT_WINDOWS, Training, generate, held_out_loss
from gpipe_fast import GPipe
from tests.examples.gpt.tiny import MicroBatches, piped, press_ctrl_c, tiny, tiny_model, trained

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_held_out_loss_falls(folder: Path) -> None:
    args = tiny("--steps", "60", "--lr", "1e-2")
    text = demo_text.load(folder)
    model = piped(args)
    first = held_out_loss(model, text.held_out, args)
    losses = trained(model, args, text).losses
    last = held_out_loss(model, text.held_out, args)
    assert first == pytest.approx(8.0, abs=0.1)  # bits per byte: the initial prediction is uniform
    assert last < 4.0
    assert len(losses) == 60
    assert held_out_loss(model, text.held_out, args) == last


def test_the_held_out_loss_is_the_mean_over_all_windows(folder: Path) -> None:
    text, args = demo_text.load(folder).held_out, tiny()
    model = tiny_model(args)
    starts = demo_text.evenly_spaced_starts(text, HELD_OUT_WINDOWS, args.length)
    tokens, targets = demo_text.windows(text, starts, args.length)
    nats = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    assert held_out_loss(model, text, args) == pytest.approx(nats.item() / math.log(2), rel=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dropout", ["0.0", "0.1"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_training_is_that_of_a_plain_loop_bit_for_bit(folder: Path, dropout: str, checkpoint: str) -> None:
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


def test_a_sample_continues_the_prompt_past_the_window() -> None:
    args = tiny()
    layers = tiny_model(args)
    written = generate(GPipe(layers, [2, 2]), b"def ", 30, args.length, seed=0)
    assert len(written) == 34 > args.length
    assert written.startswith(b"def ")
    assert written == generate(layers, b"def ", 30, args.length, seed=0)
    assert written != generate(layers, b"def ", 30, args.length, seed=1)
