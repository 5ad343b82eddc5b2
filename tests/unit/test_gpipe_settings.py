"""Settings that the next call reads: an invalid value is refused, and the old one is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe


def model() -> GPipe:
    return GPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], chunks=2)


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("chunks", 4, 4),
        ("chunks", "auto", "auto"),
        ("schedule", "1f1b", "1f1b"),
        ("batch_dim", [0, 1], (0, 1)),
        ("checkpoint", ["never", "always"], ("never", "always")),
        ("threads_per_stage", 3, 3),
        ("threads_per_stage", None, None),
        ("memory_limit", 2**30, 2**30),
        ("capture", 0, False),
        ("fuse", 0, False),
    ],
)
def test_a_setting_may_be_set(name: str, value: Any, found: Any) -> None:
    pipe = model()
    setattr(pipe, name, value)
    assert getattr(pipe, name) == found


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("chunks", 0, ValueError),
        ("schedule", "fast", ValueError),
        ("schedule", 3, TypeError),
        ("batch_dim", (), ValueError),
        ("batch_dim", "0", TypeError),
        ("checkpoint", "sometimes", ValueError),
        ("checkpoint", ["never"], ValueError),
        ("threads_per_stage", 0, ValueError),
        ("memory_limit", -1, ValueError),
    ],
)
def test_an_invalid_value_is_refused_and_the_old_one_is_kept(name: str, value: Any, kind: type) -> None:
    pipe = model()
    before = getattr(pipe, name)
    with pytest.raises(kind):
        setattr(pipe, name, value)
    assert getattr(pipe, name) == before


def test_another_number_of_micro_batches_takes_effect_in_the_next_call() -> None:
    pipe, x = model(), torch.randn(8, 4)
    pipe(x)
    pipe.chunks = 4
    with pipe.recording() as recording:
        pipe(x)
    assert {event.action.microbatch for event in recording.stages[0]} == {0, 1, 2, 3}


def test_a_step_follows_a_change_of_fuse() -> None:
    """The layers and the loss are a pipeline of their own."""
    pipe, x = model(), torch.randn(8, 4)
    for fuse in (True, False):
        pipe.fuse = fuse
        pipe.step(x, target=x, loss_fn=nn.functional.mse_loss)
        assert [each.fuse for each in pipe._pipelines] == [fuse, fuse]
