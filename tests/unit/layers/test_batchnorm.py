"""Deferred batch norm: running statistics of the whole mini-batch; all else as the plain loop has it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, verify
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.inside import disturb_no_more, plant_failure
from tests.reference import loop_step, pipeline_step, unequal
from tests.untraceable import Of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*micro-batches on:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*runs in Python:UserWarning"),
]

M = 4
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def convolutional(**options: Any) -> nn.Sequential:
    """Batch norm of the input itself, so that its statistics do not depend on micro-batches, and two more."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm2d(3, **options),
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, **options),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2, **options)),
    )


def images(batch: int = 8, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, 8, 8, generator=generator) * seed + 3


def check_statistics(norm: nn.Module, expected: nn.Module) -> None:
    """Asserts that running statistics are others' but for rounding, and their count is."""
    for name in BUFFERS[:2]:
        torch.testing.assert_close(getattr(norm, name), getattr(expected, name), rtol=1e-5, atol=1e-6)
    assert torch.equal(getattr(norm, BUFFERS[2]), getattr(expected, BUFFERS[2]))


@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize("balance", [[5], [2, 3], [1, 1, 1, 2]], ids=str)
@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_statistics_of_the_whole_mini_batch(momentum: float | None, balance: list[int], backend: str) -> None:
    """Once a mini-batch, also where it has fewer samples than chunks; nothing of it is left for the next."""
    model = convolutional(momentum=momentum)
    first, inner = copy.deepcopy(model[0]), nn.BatchNorm2d(4, momentum=momentum)
    pipe = GPipe(model, balance, chunks=M, deferred_batch_norm=True, backend=backend)
    for step, batch in enumerate((8, 7, 3, 8)):
        pipe.checkpoint = CHECKPOINT_MODES[step % 3]
        x = images(batch, seed=step + 1)
        met = torch.cat([nn.BatchNorm2d(3)(c) for c in x.chunk(M)])
        first(x)
        inner(model[1](met))
        pipe(x).sum().backward()
        check_statistics(pipe[0], first)
        check_statistics(pipe[2], inner)
        assert pipe[4][1].num_batches_tracked == step + 1


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("mode", CHECKPOINT_MODES)
def test_all_else_is_the_plain_loop_s(mode: str, affine: bool) -> None:
    model = convolutional(affine=affine)
    expected = loop_step(model, images(), M)
    pipe = GPipe(model, [2, 3], chunks=M, checkpoint=mode, deferred_batch_norm=True, backend="aten")
    different = unequal(pipeline_step(pipe, images()), expected)
    assert set(different) == {f"buffer {layer}.{name}" for layer in ("0", "2", "4.1") for name in BUFFERS}


def item(f: nn.Module, x: Tensor) -> Any:
    """Cannot be traced."""
    return f(x) if float(x.detach().sum()) < 1e9 else x


@pytest.mark.parametrize("balance", [[3], [1, 2], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("mode", CHECKPOINT_MODES)
def test_in_python_beside_lowered_ones(mode: str, balance: list[int]) -> None:
    """From the first step, when all runs in Python, to when what can be is lowered."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3), Of(item, nn.BatchNorm2d(3)), nn.BatchNorm2d(3))
    first = copy.deepcopy(model[0])
    pipe = GPipe(model, balance, chunks=M, checkpoint=mode, deferred_batch_norm=True)
    for step in range(4):
        x = images(seed=step + 1)
        first(x)
        held = nn.BatchNorm2d(3)
        held.load_state_dict(model[1].held.state_dict())
        held(torch.cat([nn.BatchNorm2d(3)(c) for c in x.chunk(M)]))
        pipe(x).sum().backward()
        check_statistics(pipe[0], first)
        check_statistics(pipe[1].held, held)


def test_verify_leaves_them_out() -> None:
    pipe = GPipe(convolutional(), [2, 3], chunks=M, deferred_batch_norm=True)
    report = verify(pipe, images(), lambda y: y.square().mean())
    assert report, report
    assert not [row.name for row in report.rows if "running" in row.name]
    pipe[0].eval()
    names = [row.name for row in verify(pipe, images(), lambda y: y.square().mean()).rows]
    assert [name for name in names if "running" in name] == ["buffer 0.running_mean", "buffer 0.running_var"]


def test_evaluation_and_back() -> None:
    model = convolutional()
    pipe = GPipe(model, [2, 3], chunks=M, deferred_batch_norm=True, backend="aten")
    pipe(images())
    before = {name: b.clone() for name, b in pipe.named_buffers()}
    pipe.eval()
    with torch.no_grad():
        y = pipe(images(seed=2))
        assert torch.equal(y, torch.cat([model(c) for c in images(seed=2).chunk(M)]))
    assert all(torch.equal(b, before[name]) for name, b in pipe.named_buffers())
    pipe.train()
    pipe[0].eval()  # one of them alone
    pipe(images(seed=2))
    assert [int(pipe[i].num_batches_tracked) for i in (0, 2)] == [1, 2]
    assert torch.equal(pipe[0].running_mean, before["0.running_mean"])


def test_momentum_may_change_and_gradients_be_off() -> None:
    model = convolutional()
    first = copy.deepcopy(model[0])
    pipe = GPipe(model, [2, 3], chunks=M, deferred_batch_norm=True)
    for step, momentum in enumerate((0.1, 0.5, 0.0)):
        first.momentum = model[0].momentum = momentum
        with torch.set_grad_enabled(step != 1):
            pipe(images(seed=step + 1))
        first(images(seed=step + 1))
        check_statistics(pipe[0], first)


def test_without_statistics_there_is_nothing_to_defer() -> None:
    model = convolutional(track_running_stats=False)
    pipe = GPipe(model, [2, 3], chunks=M, deferred_batch_norm=True, backend="aten")
    assert unequal(pipeline_step(pipe, images()), loop_step(model, images(), M)) == []


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.BatchNorm3d(3)])
def test_other_dimensions(layer: nn.Module) -> None:
    """Also a batch of two dimensions, which torchgpipe refuses."""
    shapes = [(8, 3), (8, 3, 5)] if isinstance(layer, nn.BatchNorm1d) else [(8, 3, 2, 2, 2)]
    for shape in shapes:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 2
        expected = copy.deepcopy(layer)
        pipe = GPipe(nn.Sequential(copy.deepcopy(layer)), [1], chunks=M, deferred_batch_norm=True)
        expected(x)
        pipe(x)
        check_statistics(pipe[0], expected)


def test_large_offsets_do_not_cancel() -> None:
    """Means a thousand times the deviation: sums of squares would lose it."""
    x = torch.randn(64, 3, 4, 4, generator=torch.Generator().manual_seed(1)) + 3000
    exact = x.double().var((0, 2, 3), unbiased=True)
    pipe = GPipe(nn.Sequential(nn.BatchNorm2d(3, momentum=1.0)), [1], chunks=8, deferred_batch_norm=True)
    pipe(x)
    torch.testing.assert_close(pipe[0].running_var.double(), exact, rtol=1e-4, atol=0)


def test_half_precision_buffers_hold_them() -> None:
    x = torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    pipe = GPipe(
        nn.Sequential(nn.BatchNorm2d(3, momentum=1.0)).bfloat16(), [1], chunks=4, deferred_batch_norm=True
    )
    pipe(x)
    exact = x.double().var((0, 2, 3), unbiased=True)
    torch.testing.assert_close(pipe[0].running_var.double(), exact, rtol=2e-2, atol=0)


def test_a_failure_leaves_them_as_they_were() -> None:
    for backend in ("aten", "eager"):
        pipe = GPipe(convolutional(), [2, 3], chunks=M, deferred_batch_norm=True, backend=backend)
        pipe(images())
        before = {name: b.clone() for name, b in pipe.named_buffers()}
        plant_failure(pipe, "1F3", "RuntimeError")
        with pytest.raises(RuntimeError, match="injected"):
            pipe(images(seed=2))
        disturb_no_more(pipe)
        assert all(torch.equal(b, before[name]) for name, b in pipe.named_buffers())


def test_modules_stay_what_they_are() -> None:
    """The same objects, keys and parameters; alone, and in a pipeline that does not defer, as ever."""
    model = convolutional()
    plain, norm = copy.deepcopy(model), model[0]
    pipe = GPipe(model, [2, 3], chunks=M, deferred_batch_norm=True)
    assert pipe[0] is norm
    assert isinstance(norm, nn.BatchNorm2d)
    assert list(pipe.state_dict()) == list(plain.state_dict())
    for again in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        again(images())
        assert again[0].num_batches_tracked == 1
    assert torch.equal(model(images()), plain(images()))
    assert torch.equal(norm.running_var, plain[0].running_var)
    other = GPipe(model, [5], chunks=M)
    assert unequal(pipeline_step(other, images()), loop_step(plain, images(), M)) == []


def test_what_comes_later_is_deferred_too() -> None:
    """A layer that is replaced, and a module within one."""
    pipe = GPipe(convolutional(), [2, 3], chunks=M, deferred_batch_norm=True)
    pipe(images())
    setattr(pipe, "0", nn.BatchNorm2d(3))
    pipe[4][1] = nn.BatchNorm2d(2)
    pipe(images())
    assert [int(n.num_batches_tracked) for n in (pipe[0], pipe[2], pipe[4][1])] == [1, 2, 1]
    pipe[4][1] = nn.SyncBatchNorm(2)
    with pytest.raises(ValueError, match=r"layer '4\.1' \(SyncBatchNorm\) synchronises its statistics"):
        pipe(images())


class Own(nn.BatchNorm2d):
    """A class of the user's."""


def test_what_cannot_be_deferred_is_refused_by_name() -> None:
    synchronised = nn.Sequential(nn.Sequential(nn.ReLU(), nn.SyncBatchNorm(3)))
    with pytest.raises(ValueError, match=r"layer '0\.1' \(SyncBatchNorm\) synchronises its statistics"):
        GPipe(synchronised, [1], deferred_batch_norm=True)
    GPipe(synchronised, [1])
    with pytest.raises(ValueError, match=r"layer '0' \(Own\) has a custom class, whose statistics cannot"):
        GPipe(nn.Sequential(Own(3)), [1], deferred_batch_norm=True)
    GPipe(nn.Sequential(Own(3)), [1])
    GPipe(nn.Sequential(Own(3, track_running_stats=False)), [1], deferred_batch_norm=True)
