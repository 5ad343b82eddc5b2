"""`verify` restores all state, and does not disturb the training around it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.reports.verify import verify
from tests.models import batch_normed, features, mlp, noisy
from tests.unit.reports.losses import Alternating, Loss, squared_loss

pytestmark = pytest.mark.usefixtures("one_thread")


class StateSnapshot:
    """The state that `verify` must not change."""

    def __init__(self, pipe: GPipe, x: Tensor) -> None:
        tensors = [x, *pipe.parameters(), *pipe.buffers()]
        self.identities = [(id(t), id(t.grad)) for t in tensors]
        self.values = [(t.detach().clone(), None if t.grad is None else t.grad.clone()) for t in tensors]
        self.modes = [module.training for module in pipe.modules()]
        self.random = torch.get_rng_state()
        self.settings = (
            (pipe.chunks, pipe.threads_per_stage, pipe.checkpoint, pipe.balance),
            (torch.get_num_threads(), torch.is_grad_enabled(), torch.is_autocast_cache_enabled()),
        )

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, StateSnapshot)
        pairs = zip(self.values, other.values, strict=True)
        assert self.identities == other.identities
        assert all(torch.equal(a, b) for (a, _), (b, _) in pairs)
        assert all(a is b or torch.equal(a, b) for (_, a), (_, b) in pairs)  # type: ignore[arg-type]
        assert self.modes == other.modes
        assert torch.equal(self.random, other.random)
        assert self.settings == other.settings
        return True


def failing(output: Tensor) -> Tensor:
    raise ZeroDivisionError("the loss")


@pytest.mark.parametrize(
    "loss",
    [(squared_loss, squared_loss), (failing,), (squared_loss, failing)],
    ids=["no failure", "first loss fails", "second loss fails"],
)
@pytest.mark.parametrize("gradients", [False, True], ids=["no gradients", "gradients"])
def test_verify_restores_all_state(loss: tuple[Loss, ...], gradients: bool) -> None:
    pipe, x = GPipe(batch_normed(), [2, 3], chunks="auto"), features(16)
    pipe[2].eval()  # unlike the other layers
    if gradients:
        pipe(x).sum().backward()
    torch.rand(3)
    torch.set_num_threads(2)
    before = StateSnapshot(pipe, x)
    if failing in loss:
        with pytest.raises(ZeroDivisionError, match="the loss"):
            verify(pipe, x, Alternating(*loss), chunks=3)
    else:
        report = verify(pipe, x, Alternating(*loss), chunks=3)
        assert report, report
    assert StateSnapshot(pipe, x) == before


def test_an_input_that_is_written_in_place_is_restored() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 4).requires_grad_(False), nn.PReLU())
    x = features()
    before = x.clone()
    report = verify(GPipe(model, [2, 1], chunks=2), x, squared_loss)
    assert report, report
    assert torch.equal(x, before)


def test_verify_may_run_between_a_forward_and_its_backward() -> None:
    pipe = GPipe(noisy(), [2, 4], chunks=4)
    x = features()
    output = pipe(x)
    assert verify(pipe, x, squared_loss)
    output.sum().backward()
    assert pipe[1].weight.grad is not None


def test_verify_runs_no_post_accumulate_grad_hooks() -> None:
    """Such a hook may run an optimizer."""
    pipe, hooked = GPipe(mlp(), [2, 3], chunks=2), []
    for parameter in pipe.parameters():
        parameter.register_post_accumulate_grad_hook(hooked.append)
    assert verify(pipe, features(), squared_loss)
    assert hooked == []
    squared_loss(pipe(features())).backward()
    assert len(hooked) == 6


@pytest.mark.parametrize(("threads_per_stage", "expected"), [(None, 2), (1, 1), (3, 3)])
def test_verify_uses_the_thread_count_of_a_stage(threads_per_stage: int | None, expected: int) -> None:
    seen = []

    def loss(output: Tensor) -> Tensor:
        seen.append((torch.get_num_threads(), pipe.threads_per_stage))
        return squared_loss(output)

    pipe = GPipe(mlp(), [2, 3], chunks=2)
    pipe.threads_per_stage = threads_per_stage
    torch.set_num_threads(4)
    assert verify(pipe, features(), loss)
    assert seen == [(expected, expected)] * 2


@pytest.mark.usefixtures("fresh_warnings")
def test_verify_leaves_the_warning_about_few_micro_batches_to_training() -> None:
    pipe = GPipe(mlp(), [2, 3], chunks=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verify(pipe, features(), squared_loss)
    with pytest.warns(UserWarning, match="2 micro-batches on 2 stages"):
        pipe(features())
