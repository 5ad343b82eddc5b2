"""Settings that the next call reads: an invalid value is refused, and the old one is kept."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.container import runner_of
from gpipe_fast.runtime.settings import _CHECKS, Settings


def model(**options: Any) -> GPipe:
    return GPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], chunks=2, **options)


def test_a_setting_may_be_set() -> None:
    pipe = model()
    for name, value, found in (
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
    ):
        setattr(pipe, name, value)
        assert getattr(pipe, name) == found


INVALID: dict[str, list[tuple[Any, type[Exception]]]] = {
    "balance": [("11", TypeError), (2, TypeError), ([1.5, 0.5], ValueError), ([0, 2], ValueError)],
    "devices": [("cpu", TypeError), (torch.device("cpu"), TypeError), (0, TypeError), (["cpu"], IndexError)],
    "chunks": [(0, ValueError), (2.9, ValueError), (True, ValueError), ("x", ValueError)],
    "schedule": [("fast", ValueError), (3, TypeError)],
    "batch_dim": [((), ValueError), ("0", TypeError), (0.5, TypeError), (None, TypeError)],
    "checkpoint": [(value, ValueError) for value in ("sometimes", ["never"], [], None, float("nan"))],
    "threads_per_stage": [(0, ValueError), (True, ValueError)],
    "memory_limit": [(-1, ValueError)],
}


def test_an_invalid_value_is_refused_and_the_old_one_is_kept() -> None:
    pipe = model(devices=["cpu"] * 2)
    for name, values in INVALID.items():
        before = getattr(pipe, name)
        for value, kind in values:
            with pytest.raises(kind, match=name.partition("_")[0]):
                setattr(pipe, name, value)
            assert getattr(pipe, name) == before


# Of each setting that is an argument: its name there, and a value that is not the default.
ARGUMENTS: dict[str, tuple[str, Any]] = {
    "chunks": ("chunks", 3),
    "checkpoint": ("checkpoint", "always"),
    "batch_dim": ("batch_dim", 1),
    "memory_limit": ("memory", 2**30),
    "deferred_batch_norm": ("deferred_batch_norm", True),
    "backend": ("backend", "aten"),
    "grad_dtype": ("grad_dtype", torch.float32),
    "transport": ("transport", "pinned"),
    "schedule": ("schedule", "1f1b"),
    "fuse": ("fuse", False),
    "capture": ("capture", True),
}


def test_every_setting_is_checked_and_reaches_the_runner() -> None:
    names = {field.name for field in dataclasses.fields(Settings)}
    assert _CHECKS.keys() == names
    assert ARGUMENTS.keys() == names - {"threads_per_stage"}
    values = {name: value for name, (_, value) in ARGUMENTS.items()}
    pipe = GPipe(nn.Sequential(nn.Linear(4, 4)), [1], **dict(ARGUMENTS.values()))
    assert runner_of(pipe).settings == Settings(**values)
    taken = inspect.signature(GPipe.from_model).parameters
    arguments = {name: value for name, value in ARGUMENTS.values() if name in taken}
    assert len(arguments) == len(ARGUMENTS) - 2  # it splits along dimension 0, and defers no statistics
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model = GPipe.from_model(plain, (torch.zeros(3, 4),), blocks=[*plain], balance=[2, 1], **arguments)
    kept = {name: value for name, (argument, value) in ARGUMENTS.items() if argument in arguments}
    assert runner_of(model.pipeline).settings == Settings(**kept)
