"""The demo's report on a step: the plain loop, the comparisons and the timeline."""

from __future__ import annotations

import copy
import itertools
import re

import pytest
import torch

from examples.gpt.__main__ import cross_entropy
from examples.gpt.report import PlainLoop, compare, compare_bits, time_first_steps, timeline
from gpipe_fast.recording import Event, Recording
from gpipe_fast.schedule import Action
from tests.examples.gpt.tiny import piped, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_the_plain_loop_of_the_table_computes_the_same(checkpoint: str) -> None:
    args = tiny("--dropout", "0.2", "--checkpoint", checkpoint)
    pipe, tokens = piped(args, [1, 2, 1]), torch.randint(256, (6, 16))
    plain = PlainLoop(pipe, args.dropout > 0)
    assert [len(partition) for partition in plain.partitions] == pipe.balance  # type: ignore[arg-type]
    gradients = []
    for model in (pipe.eval(), plain.eval()):
        pipe.zero_grad()
        model(tokens).square().sum().backward()
        gradients.append([p.grad for p in pipe.parameters()])
    assert all(map(torch.equal, *gradients))


def test_the_comparison_times_both_and_changes_nothing() -> None:
    """The times, rates and ratios are consistent, and the parameters are unchanged."""
    args = tiny()
    pipe = piped(args)
    tokens, targets = torch.randint(256, (2, 6, 16))
    before = copy.deepcopy(pipe.state_dict())
    torch.set_num_threads(2)
    lines = compare(pipe, tokens, lambda logits: cross_entropy(logits, targets), False).splitlines()
    *plain, ours = ([float(number) for number in re.findall("[0-9.]+", line)] for line in lines[-3:])
    threads, milliseconds, rate, ratio = ours
    assert [row[0] for row in plain] == [1, 2]
    assert threads == torch.get_num_threads() == 2
    # Times and rates are printed with one decimal, ratios with two.
    least, most, fastest = milliseconds - 0.05, milliseconds + 0.05, min(row[1] for row in plain)
    assert (fastest - 0.05) / most - 0.006 < ratio < (fastest + 0.05) / least + 0.006
    assert 6000 / most - 0.06 < rate < 6000 / least + 0.06
    assert all(torch.equal(before[name], value) for name, value in pipe.state_dict().items())


def test_the_first_steps_leave_gradients_and_random_state_alone() -> None:
    args = tiny("--dropout", "0.2")
    pipe, (tokens, targets) = piped(args), torch.randint(256, (2, 6, 16))
    before = torch.get_rng_state()
    assert "first step: " in time_first_steps(pipe, tokens, lambda logits: cross_entropy(logits, targets))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in pipe.parameters())


def test_a_step_that_differs_from_the_plain_loop_is_reported() -> None:
    pipe, (tokens, targets) = piped(tiny()), torch.randint(256, (2, 6, 16))
    factors = itertools.count(1)  # the loss function is called twice, and returns another loss
    text = compare_bits(pipe, tokens, lambda logits: cross_entropy(logits, targets) * next(factors))
    assert "tensors differ from the plain loop's" in text
    assert "bit for bit" not in text


# One line for each stage: an action, and its begin and end in seconds. Transfers are not drawn.
RECORDED = (
    "F0 0 2  SEND_F0 2 2  F1 2 4  SEND_F1 4 4  RECV_B1 7 7  B1 8 9  RECV_B0 9 9  B0 9 10",
    "RECV_F0 2 2  F0 2 4  RECV_F1 4 4  F1 4 5.5  B1 5.5 7  SEND_B1 7 7  B0 7 9  SEND_B0 9 9",
)


def test_a_timeline_shows_actions_where_they_ran() -> None:
    recording = Recording()
    recording.stages = tuple(
        tuple(
            Event(Action.parse(f"{stage}{name}"), False, float(begin), float(end), run=1 + ("F" not in name))
            for name, begin, end in (action.split() for action in re.split(" {2,}", line))
        )
        for stage, line in enumerate(RECORDED)
    )
    headline, *rows = timeline(recording, columns=20).splitlines()[:3]
    assert "10000 ms" in headline
    assert f"idle for {recording.bubble():.0%}" in headline
    assert rows == ["  stage 0 F0==F1==........B1B0", "  stage 1 ....F0==F1=B1=B0==.."]
