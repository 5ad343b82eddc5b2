"""What goes on around steps on a GPU: callers on streams of their own, failures, memory that runs out."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.equivalence.test_cuda import CHUNKS, ONE, beyond, captured_or_not, check, piped, subject
from tests.reference import Result, loop_step, unequal

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("deterministic", "one_thread")]

# Some 50 ms, in which the host is far ahead of the GPU.
LATE_CYCLES = 100_000_000


def late(x: Tensor) -> Tensor:
    """A copy that the current stream makes late."""
    torch.cuda._sleep(LATE_CYCLES)
    return x.clone()


def step(pipe: GPipe, x: Tensor, gradient: Tensor) -> Result:
    """One whose input and gradient are late, and overwritten as soon as the caller's stream allows."""
    for parameter in pipe.parameters():
        parameter.grad = None
    leaf, given = late(x).requires_grad_(), late(gradient)
    output = pipe(leaf)
    output.backward(given)
    with torch.no_grad():
        leaf.fill_(torch.nan)
        given.fill_(torch.nan)
    result: Result = {"output": output.detach().clone(), "input gradient": leaf.grad}
    result |= {f"gradient of {n}": p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
    return result


def differing(capture: bool, ours: Result, plain: Result, exact: Result) -> list[str]:
    """What has not the loop's bits, or if captured is further off than it may be."""
    return beyond([ours], [plain], [exact]) if capture else unequal(ours, plain)


@captured_or_not
def test_callers_on_streams_of_their_own(capture: bool) -> None:
    """Without any synchronisation but that of streams, whichever stream a step is on."""
    model, x = subject("mlp")
    pipe = piped(model, capture=capture)
    gradient = torch.randn_like(model(x))
    expected = loop_step(model, x, CHUNKS, gradient=gradient)
    truth = loop_step(copy.deepcopy(model).double(), x.double(), CHUNKS, gradient=gradient.double())
    streams = [torch.cuda.Stream(ONE[0]), torch.cuda.Stream(ONE[0]), torch.cuda.current_stream(ONE[0])]
    torch.cuda.synchronize()
    for turn in range(6):
        stream = streams[turn % len(streams)]
        with torch.cuda.stream(stream):
            found = step(pipe, x, gradient)
        stream.synchronize()
        assert differing(capture, found, expected, truth) == [], f"turn {turn}"


@captured_or_not
def test_an_optimizer_that_follows_at_once(capture: bool) -> None:
    """Parameters change in place while the host is ahead: every step reads what the one before has left."""
    (model, x), (plain, _) = subject("mlp"), subject("mlp")
    exact = copy.deepcopy(plain).double()
    pipe = piped(model, capture=capture)
    gradient = torch.randn_like(plain(x))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (model, plain, exact)]
    for _ in range(8):
        pipe(late(x)).backward(gradient)
        torch.cat([plain(part) for part in x.chunk(CHUNKS)]).backward(gradient)
        torch.cat([exact(part) for part in x.double().chunk(CHUNKS)]).backward(gradient.double())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert differing(capture, *(dict(each.named_parameters()) for each in (model, plain, exact))) == []


class Products(nn.Module):
    """Products of all pairs of elements, which only few rows have memory for."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten()
        return x + (flat[:, None] * flat[None, :]).mean()


@captured_or_not
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_memory_that_runs_out(checkpoint: str, capture: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Products(), nn.Linear(8, 4)).to(ONE[0])
    x = torch.randn(16, 6, device=ONE[0])
    pipe = piped(model, checkpoint, capture=capture)
    for _ in range(3):
        check(pipe, model, x, capture)
        before = {name: p.grad for name, p in model.named_parameters()}
        # Ten terabytes.
        with pytest.raises(torch.OutOfMemoryError):
            pipe(torch.randn(CHUNKS << 18, 6, device=ONE[0])).sum().backward()
        assert {name: p.grad for name, p in model.named_parameters()} == before


class Choosy(nn.Module):
    """Refuses what is too large; it runs in Python, for it asks."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x.abs().max()) > 100:
            raise ValueError("too large")
        return x.tanh()


@pytest.mark.filterwarnings("ignore:stage")
@captured_or_not
def test_a_layer_that_fails_now_and_then(capture: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Choosy(), nn.Linear(8, 8), nn.Linear(8, 4)).to(ONE[0])
    x = torch.randn(16, 6, device=ONE[0])
    pipe = piped(model, capture=capture)
    for _ in range(4):
        check(pipe, model, x, capture)
        with pytest.raises(ValueError, match="too large"):
            pipe(late(x * 1e6))
        torch.cuda._sleep(LATE_CYCLES)
    assert all(p.grad is None for p in pipe.parameters())


@captured_or_not
def test_pipelines_that_take_turns(capture: bool) -> None:
    """Each has streams and memory of its own."""
    pairs = [subject(name) for name in ("mlp", "convolutions", "dropout")]
    pipes = [piped(model, capture=capture) for model, _ in pairs]
    for _ in range(4):
        for (model, x), pipe in zip(pairs, pipes, strict=True):
            check(pipe, model, x, capture)
