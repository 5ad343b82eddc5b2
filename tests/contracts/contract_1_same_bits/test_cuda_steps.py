"""Steps on a GPU under callers' own streams, failures, and lack of memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.contracts.contract_1_same_bits.test_cuda import (
    CHUNKS,
    ONE_GPU,
    captured_or_not,
    check_step,
    inaccurate_tensors,
    make_pipe,
    model_and_batch,
)
from tests.reference import Result, loop_step, unequal

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("deterministic", "one_thread")]

# About 50 ms, so that the host runs far ahead of the GPU.
DELAY_CYCLES = 100_000_000


def delayed_copy(x: Tensor) -> Tensor:
    """Returns a copy that the current stream makes after a delay."""
    torch.cuda._sleep(DELAY_CYCLES)
    return x.clone()


def step(pipe: GPipe, x: Tensor, gradient: Tensor) -> Result:
    """Runs a step whose input and gradient are ready late, and overwrites both in the caller's stream."""
    for parameter in pipe.parameters():
        parameter.grad = None
    delayed_input, output_gradient = delayed_copy(x).requires_grad_(), delayed_copy(gradient)
    output = pipe(delayed_input)
    output.backward(output_gradient)
    with torch.no_grad():
        delayed_input.fill_(torch.nan)
        output_gradient.fill_(torch.nan)
    result: Result = {"output": output.detach().clone(), "input gradient": delayed_input.grad}
    result |= {f"gradient of {n}": p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
    return result


def wrong_tensors(capture: bool, ours: Result, plain: Result, exact: Result) -> list[str]:
    """Returns the names of tensors that differ from the loop's, or whose error is too large if captured."""
    return inaccurate_tensors([ours], [plain], [exact]) if capture else unequal(ours, plain)


@captured_or_not
def test_callers_on_their_own_streams_need_no_synchronization(capture: bool) -> None:
    """No synchronisation is needed beyond stream order, whichever stream a step runs in."""
    model, x = model_and_batch("mlp")
    pipe = make_pipe(model, capture=capture)
    gradient = torch.randn_like(model(x))
    expected = loop_step(model, x, CHUNKS, gradient=gradient)
    truth = loop_step(copy.deepcopy(model).double(), x.double(), CHUNKS, gradient=gradient.double())
    streams = [
        torch.cuda.Stream(ONE_GPU[0]),
        torch.cuda.Stream(ONE_GPU[0]),
        torch.cuda.current_stream(ONE_GPU[0]),
    ]
    torch.cuda.synchronize()
    for step_index in range(6):
        stream = streams[step_index % len(streams)]
        with torch.cuda.stream(stream):
            result = step(pipe, x, gradient)
        stream.synchronize()
        assert wrong_tensors(capture, result, expected, truth) == [], f"step {step_index}"


@captured_or_not
def test_an_optimizer_step_right_after_the_backward_is_seen_by_the_next_step(capture: bool) -> None:
    """The optimizer updates parameters in place while the host runs ahead; each step must read the update."""
    (model, x), (plain, _) = model_and_batch("mlp"), model_and_batch("mlp")
    exact = copy.deepcopy(plain).double()
    pipe = make_pipe(model, capture=capture)
    gradient = torch.randn_like(plain(x))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (model, plain, exact)]
    for _ in range(8):
        pipe(delayed_copy(x)).backward(gradient)
        torch.cat([plain(part) for part in x.chunk(CHUNKS)]).backward(gradient)
        torch.cat([exact(part) for part in x.double().chunk(CHUNKS)]).backward(gradient.double())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert wrong_tensors(capture, *(dict(each.named_parameters()) for each in (model, plain, exact))) == []


class AllPairProducts(nn.Module):
    """Multiplies all pairs of elements, which fits in memory only for few rows."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten()
        return x + (flat[:, None] * flat[None, :]).mean()


@captured_or_not
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_step_that_runs_out_of_memory_leaves_the_pipeline_usable(checkpoint: str, capture: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), AllPairProducts(), nn.Linear(8, 4)).to(ONE_GPU[0])
    x = torch.randn(16, 6, device=ONE_GPU[0])
    pipe = make_pipe(model, checkpoint, capture=capture)
    for _ in range(3):
        check_step(pipe, model, x, capture)
        before = {name: p.grad for name, p in model.named_parameters()}
        # This needs about ten terabytes.
        with pytest.raises(torch.OutOfMemoryError):
            pipe(torch.randn(CHUNKS << 18, 6, device=ONE_GPU[0])).sum().backward()
        assert {name: p.grad for name, p in model.named_parameters()} == before
