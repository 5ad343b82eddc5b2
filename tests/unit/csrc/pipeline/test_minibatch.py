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


def test_gradients_are_accumulated_from_the_last_micro_batch_to_the_first() -> None:
    pipe, x = mlp(), data()
    model, parameters = nn.Sequential(*pipe), list(pipe.parameters())
    output, tangent = pipe(x), torch.randn(BATCH, WIDTH)
    each = [
        torch.autograd.grad(model(m), parameters, t)
        for m, t in zip(x.chunk(M), tangent.chunk(M), strict=True)
    ]
    assert torch.equal(output, torch.cat([model(m) for m in x.chunk(M)]))
    found, forwards = torch.autograd.grad(output, parameters, tangent), []
    for ours, (a, b, c, d) in zip(found, zip(*each, strict=True), strict=True):
        assert torch.equal(ours, ((d + c) + b) + a)
        forwards.append(((a + b) + c) + d)
    assert not all(map(torch.equal, found, forwards))


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


def test_written_statistics_are_those_of_earlier_graphs_that_saved_them() -> None:
    """PyTorch's batch norm writes them without a new version, so that the loop raises no error, either."""
    gradients = []
    for is_pipe in (True, False):
        norm, x = nn.BatchNorm1d(WIDTH), data()
        earlier = norm.eval()(x).square().sum()
        norm.train()
        pipe = with_norm(norm, "always")
        pipe(x) if is_pipe else [nn.Sequential(*pipe)(part) for part in x.chunk(M)]
        assert norm.num_batches_tracked == M
        norm.zero_grad()
        earlier.backward()
        gradients.append(norm.weight.grad)
    assert torch.equal(*gradients)


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
