"""Deferred batch norm: running statistics of the whole mini-batch, all else equal to the plain loop."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, verify
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.internals import inject_failure, remove_faults
from tests.reference import loop_step, pipeline_step, unequal
from tests.untraceable import FunctionLayer

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*micro-batches on:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*runs in Python:UserWarning"),
]

M = 4
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def convolutional(**options: Any) -> nn.Sequential:
    """Three batch norms. The first normalizes the input, so its statistics do not depend on other layers."""
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
    """Asserts that running statistics are equal up to rounding, and batch counts exactly."""
    for name in BUFFERS[:2]:
        torch.testing.assert_close(getattr(norm, name), getattr(expected, name), rtol=1e-5, atol=1e-6)
    assert torch.equal(getattr(norm, BUFFERS[2]), getattr(expected, BUFFERS[2]))


@pytest.mark.parametrize(
    ("momentum", "balance", "backend"),
    [(0.1, [5], "aten"), (0.1, [2, 3], "eager"), (None, [1, 1, 1, 2], "aten")],
    ids=str,
)
def test_running_statistics_are_those_of_the_whole_mini_batch(
    momentum: float | None, balance: list[int], backend: str
) -> None:
    """Each mini-batch updates them once, even if it has fewer samples than chunks; no sums carry over."""
    model = convolutional(momentum=momentum)
    first, inner = copy.deepcopy(model[0]), nn.BatchNorm2d(4, momentum=momentum)
    pipe = GPipe(model, balance, chunks=M, deferred_batch_norm=True, backend=backend)
    for step, batch in enumerate((8, 7, 3, 8)):
        pipe.checkpoint = CHECKPOINT_MODES[step % len(CHECKPOINT_MODES)]
        x = images(batch, seed=step + 1)
        normalized = torch.cat([nn.BatchNorm2d(3)(c) for c in x.chunk(M)])
        first(x)
        inner(model[1](normalized))
        pipe(x).sum().backward()
        check_statistics(pipe[0], first)
        check_statistics(pipe[2], inner)
        assert pipe[4][1].num_batches_tracked == step + 1


@pytest.mark.parametrize("mode", CHECKPOINT_MODES)
def test_everything_but_running_statistics_equals_the_plain_loop(mode: str) -> None:
    model = convolutional(affine=mode != "never")
    expected = loop_step(model, images(), M)
    pipe = GPipe(model, [2, 3], chunks=M, checkpoint=mode, deferred_batch_norm=True, backend="aten")
    different = unequal(pipeline_step(pipe, images()), expected)
    assert set(different) == {f"buffer {layer}.{name}" for layer in ("0", "2", "4.1") for name in BUFFERS}


def branch_on_value(f: nn.Module, x: Tensor) -> Any:
    """Applies a layer under a data-dependent branch, which cannot be traced."""
    return f(x) if float(x.detach().sum()) < 1e9 else x


@pytest.mark.parametrize(
    ("mode", "balance"), zip(CHECKPOINT_MODES, ([3], [1, 2], [2, 1], [1, 1, 1]), strict=True), ids=str
)
def test_statistics_are_deferred_in_python_layers_and_lowered_layers(mode: str, balance: list[int]) -> None:
    """The first step runs every layer in Python; later steps run the lowered layers."""
    norms = [nn.BatchNorm2d(3) for _ in range(3)]
    model = nn.Sequential(norms[0], FunctionLayer(branch_on_value, norms[1]), norms[2])
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


def test_verify_leaves_out_deferred_statistics() -> None:
    pipe = GPipe(convolutional(), [2, 3], chunks=M, deferred_batch_norm=True)
    report = verify(pipe, images(), lambda y: y.square().mean())
    assert report, report
    assert not [row.name for row in report.rows if "running" in row.name]
    pipe[0].eval()
    names = [row.name for row in verify(pipe, images(), lambda y: y.square().mean()).rows]
    assert [name for name in names if "running" in name] == ["buffer 0.running_mean", "buffer 0.running_var"]


def test_evaluation_leaves_running_statistics_unchanged() -> None:
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
    pipe[0].eval()  # only this batch norm
    pipe(images(seed=2))
    assert [int(pipe[i].num_batches_tracked) for i in (0, 2)] == [1, 2]
    assert torch.equal(pipe[0].running_mean, before["0.running_mean"])


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.BatchNorm3d(3)])
def test_batch_norm_1d_and_3d_are_deferred(layer: nn.Module) -> None:
    """This includes two-dimensional batches, which torchgpipe refuses."""
    shapes = [(8, 3), (8, 3, 5)] if isinstance(layer, nn.BatchNorm1d) else [(8, 3, 2, 2, 2)]
    for shape in shapes:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 2
        expected = copy.deepcopy(layer)
        pipe = GPipe(nn.Sequential(copy.deepcopy(layer)), [1], chunks=M, deferred_batch_norm=True)
        expected(x)
        pipe(x)
        check_statistics(pipe[0], expected)


@pytest.mark.parametrize(
    ("dtype", "mean", "tolerance"), [(torch.float32, 3000, 1e-4), (torch.bfloat16, 0, 2e-2)], ids=str
)
def test_the_variance_is_accurate(dtype: torch.dtype, mean: float, tolerance: float) -> None:
    """Sums of squares would lose the variance where the mean is 3000 times the deviation."""
    x = (torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(1)) + mean).to(dtype)
    exact = x.double().var((0, 2, 3), unbiased=True)
    norm = nn.Sequential(nn.BatchNorm2d(3, momentum=1.0)).to(dtype)
    pipe = GPipe(norm, [1], chunks=8, deferred_batch_norm=True)
    pipe(x)
    torch.testing.assert_close(pipe[0].running_var.double(), exact, rtol=tolerance, atol=0)


def test_a_failed_step_leaves_running_statistics_unchanged() -> None:
    for backend in ("aten", "eager"):
        pipe = GPipe(convolutional(), [2, 3], chunks=M, deferred_batch_norm=True, backend=backend)
        pipe(images())
        before = {name: b.clone() for name, b in pipe.named_buffers()}
        inject_failure(pipe, "1F3", "RuntimeError")
        with pytest.raises(RuntimeError, match="injected"):
            pipe(images(seed=2))
        remove_faults(pipe)
        assert all(torch.equal(b, before[name]) for name, b in pipe.named_buffers())


def test_deferring_changes_neither_module_objects_nor_state_dict_keys() -> None:
    """Outside of the pipeline, and in one that does not defer, the modules compute as before."""
    model = convolutional()
    plain, norm = copy.deepcopy(model), model[0]
    pipe = GPipe(model, [2, 3], chunks=M, deferred_batch_norm=True)
    assert pipe[0] is norm
    assert isinstance(norm, nn.BatchNorm2d)
    assert list(pipe.state_dict()) == list(plain.state_dict())
    for copied in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        copied(images())
        assert copied[0].num_batches_tracked == 1
    assert torch.equal(model(images()), plain(images()))
    assert torch.equal(norm.running_var, plain[0].running_var)
    other = GPipe(model, [5], chunks=M)
    assert unequal(pipeline_step(other, images()), loop_step(plain, images(), M)) == []


def test_batch_norms_assigned_after_construction_are_deferred() -> None:
    """Covers a replaced layer and a replaced module within a layer."""
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
    """A user-defined subclass."""


def test_batch_norms_that_cannot_be_deferred_are_refused_by_name() -> None:
    synchronised = nn.Sequential(nn.Sequential(nn.ReLU(), nn.SyncBatchNorm(3)))
    with pytest.raises(ValueError, match=r"layer '0\.1' \(SyncBatchNorm\) synchronises its statistics"):
        GPipe(synchronised, [1], deferred_batch_norm=True)
    GPipe(synchronised, [1])
    with pytest.raises(ValueError, match=r"layer '0' \(Own\) has a custom class, whose statistics cannot"):
        GPipe(nn.Sequential(Own(3)), [1], deferred_batch_norm=True)
    GPipe(nn.Sequential(Own(3)), [1])
    GPipe(nn.Sequential(Own(3, track_running_stats=False)), [1], deferred_batch_norm=True)
