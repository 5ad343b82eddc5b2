"""The demo's report: the plain loop computes the same gradients and saves as many bytes as the pipeline."""

from __future__ import annotations

import copy

import pytest
import torch

from examples.gpt.report import PlainLoop, compare, saved_bytes
from gpipe_fast._extension import kept_bytes
from tests.examples.gpt.tiny import piped, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_the_plain_loop_of_the_table_computes_the_same(checkpoint: str) -> None:
    args = tiny("--dropout", "0.2", "--checkpoint", checkpoint)
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
    """Both save only boundary activations: 6 x 16 int64 tokens, and twice 16 floats per token."""
    args = tiny("--checkpoint", "always")
    pipe, tokens = piped(args, [1, 2, 1]), torch.randint(256, (6, 16))
    expected = 6 * 16 * (8 + 2 * 16 * 4)
    assert saved_bytes(PlainLoop(pipe, 3, False), tokens) == kept_bytes(pipe(tokens)) == expected
    pipe.checkpoint = "never"
    assert saved_bytes(PlainLoop(pipe, 3, False), tokens) > 5 * expected


def test_the_table_compares_both() -> None:
    """The table's times, rates, bytes and speedup are consistent, and the model is unchanged."""
    args = tiny()
    pipe = piped(args)
    tokens, targets = torch.randint(256, (2, 6, 16))
    before = copy.deepcopy(pipe.state_dict())
    _, _, *rows, _ = compare(pipe, tokens, targets, args).splitlines()
    (plain, _, kept, one), (ours, rate, ours_kept, ratio) = (map(float, row.split()[-4:]) for row in rows)
    assert one == 1.0
    assert ratio == pytest.approx(plain / ours, abs=0.2)
    assert rate == pytest.approx(6000 / ours, rel=0.1)
    assert 0 < ours_kept <= kept
    assert all(torch.equal(before[name], value) for name, value in pipe.state_dict().items())
