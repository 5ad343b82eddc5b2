"""Mini-batches: the order of accumulation, memory kept for the backward, and buffers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast._extension import kept_bytes
from tests.internals import plan_of

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, BATCH, M = 8, 32, 4


def mlp(balance: Sequence[int] = (4, 4), checkpoint: str = "always") -> GPipe:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return GPipe(nn.Sequential(*layers), list(balance), chunks=M, checkpoint=checkpoint)


def with_norm(norm: nn.Module, checkpoint: str) -> GPipe:
    return GPipe(nn.Sequential(norm, nn.Tanh()), [1, 1], chunks=M, checkpoint=checkpoint)


def data() -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2), requires_grad=True)


def test_kept_bytes_are_those_of_boundary_activations_and_of_what_is_saved() -> None:
    """Contract 4: K stages of an MLP keep the mini-batch and K - 1 boundary activations of its size."""
    x = data()
    for balance in ([8], [4, 4], [2, 2, 2, 2]):
        assert kept_bytes(mlp(balance)(x)) == len(balance) * BATCH * WIDTH * 4
    always, except_last, never = (
        kept_bytes(mlp(checkpoint=mode)(x)) for mode in ("always", "except_last", "never")
    )
    assert always < except_last < never
    pipe = mlp()
    output = pipe(x)
    for retain, expected in ((True, always), (False, 0)):
        output.backward(torch.ones_like(output), retain_graph=retain)
        assert kept_bytes(output) == expected
    with torch.no_grad():
        assert kept_bytes(pipe(x)) == 0
    assert kept_bytes(nn.Linear(WIDTH, WIDTH)(x)) == 0


def test_inference_bounds_the_slots_of_a_schedule() -> None:
    pipe = mlp()
    assert plan_of(pipe, data()).schedule.slots == M
    pipe.chunks = 16
    with torch.no_grad():
        assert plan_of(pipe, data()).schedule.slots < 16


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_change_of_a_buffer_before_the_backward_raises(checkpoint: str) -> None:
    """The backward reads the statistics, as in eager mode; a recompute cannot read the old data, either."""
    norm, x = nn.BatchNorm1d(WIDTH).eval(), data()
    pipe = with_norm(norm, checkpoint).eval()
    for forward in (nn.Sequential(*pipe), pipe):
        loss = forward(x).sum()
        norm.running_var.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    loss = pipe(x).sum()
    norm.running_var.data = torch.ones(WIDTH) * 2
    if checkpoint == "always":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
