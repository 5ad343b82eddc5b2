"""Snapshots of buffers: changes are seen, undone, and hidden from autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_fast.runtime.python_state import run_and_undo, snapshot_buffers


def test_tables_that_an_embedding_renormalizes_are_kept() -> None:
    assert snapshot_buffers([nn.Embedding(4, 2)]) == []
    layer = nn.Embedding(4, 2, max_norm=0.1)
    (snapshot,) = snapshot_buffers([layer])
    layer(torch.arange(4))
    assert snapshot.is_changed()
    snapshot.restore()
    assert torch.equal(layer.weight, snapshot.copy)
    assert layer.weight.requires_grad


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
