"""Snapshots of buffers: changes are seen, undone, and hidden from autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_fast.runtime.python_state import run_and_undo, run_with_buffers, snapshot_buffers


def norm() -> nn.BatchNorm1d:
    torch.manual_seed(0)
    return nn.BatchNorm1d(3)


def test_a_buffer_that_is_written_is_changed_and_restored() -> None:
    layer = norm()
    snapshots = snapshot_buffers([layer])
    assert [each.name for each in snapshots] == ["running_mean", "running_var", "num_batches_tracked"]
    before = layer.running_mean
    layer(torch.randn(4, 3))
    assert [each.is_changed() for each in snapshots] == [True] * 3
    for each in snapshots:
        each.restore()
    assert layer.running_mean is before
    assert torch.equal(layer.running_mean, torch.zeros(3))
    assert not any(each.is_changed() for each in snapshots)


def test_a_buffer_that_is_replaced_by_an_equal_one_is_changed_and_restored() -> None:
    layer = norm()
    snapshots = snapshot_buffers([layer])
    before, layer.running_mean = layer.running_mean, layer.running_mean.clone()
    assert [each.is_changed() for each in snapshots] == [True, False, False]
    snapshots[0].restore()
    assert layer.running_mean is before


def test_tables_that_an_embedding_renormalizes_are_kept() -> None:
    assert snapshot_buffers([nn.Embedding(4, 2)]) == []
    layer = nn.Embedding(4, 2, max_norm=0.1)
    (snapshot,) = snapshot_buffers([layer])
    layer(torch.arange(4))
    assert snapshot.is_changed()
    snapshot.restore()
    assert torch.equal(layer.weight, snapshot.copy)
    assert layer.weight.requires_grad


def test_a_recompute_reads_the_snapshot_and_changes_nothing() -> None:
    layer = norm()
    snapshots = snapshot_buffers([layer])
    layer(torch.randn(4, 3))
    mean, version = layer.running_mean.clone(), layer.running_mean._version

    def run() -> torch.Tensor:
        read = layer.running_mean.clone()
        layer(torch.randn(4, 3))
        return read

    assert torch.equal(run_with_buffers(snapshots, run), torch.zeros(3))
    assert torch.equal(layer.running_mean, mean)
    assert layer.running_mean._version == version


def test_inference_tensors_are_restored() -> None:
    with torch.inference_mode():
        layer = norm()
    (snapshot, *_) = snapshot_buffers([layer])
    with torch.inference_mode():
        layer.running_mean.add_(1)
    snapshot.restore()
    assert torch.equal(layer.running_mean, torch.zeros(3))


def test_changes_are_undone_after_an_error_and_in_spite_of_an_interrupt() -> None:
    undone = []

    def undo() -> None:
        undone.append(len(undone))
        if len(undone) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_and_undo(lambda: 1, undo)
    assert undone == [0, 1]

    def fails() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        run_and_undo(fails, undo)
    assert undone == [0, 1, 2]
    assert run_and_undo(lambda: 1, undo) == 1
