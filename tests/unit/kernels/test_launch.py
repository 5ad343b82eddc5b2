"""Launches of kernels, without a GPU: the current device, and when kernels run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gpipe_fast.kernels import launch as launch_module
from gpipe_fast.kernels.launch import (
    Config,
    kernels_available,
    launch,
    num_partial_sums,
    recording_launches,
    uses_kernels,
)


def test_launch_makes_the_device_of_the_tensors_current(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []

    @contextlib.contextmanager
    def fake_device_guard(tensor: Tensor) -> Iterator[None]:
        events.append(tensor.device)
        yield
        events.append("left")

    wrapped = {(1,): lambda *_, **__: events.append("kernel")}
    monkeypatch.setattr(launch_module, "wrap_triton", lambda kernel: wrapped)
    # If CUDA is initialised, there may be several devices.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_of", fake_device_guard)
    launch("kernel", (1,), Config({}), 3, torch.empty(2, device="meta"))
    assert events == [torch.device("meta"), "kernel", "left"]


def test_a_recorder_receives_launches_and_nothing_runs() -> None:
    recorded: list[tuple[object, ...]] = []
    config, argument = Config({"COLS": 4}), torch.empty(2)
    with recording_launches(lambda *launched: recorded.append(launched)):
        launch("kernel", [2, 3], config, argument, 5, FLAG=True)
        launch("kernel", (0,), config, argument)
    assert recorded == [("kernel", (2, 3), config, (argument, 5), {"FLAG": True})]
    with pytest.raises(RuntimeError):  # no recorder: it needs a real kernel
        launch("kernel", (1,), config, argument)


def test_kernels_run_on_the_cpu_only_in_the_interpreter_and_not_in_fp64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    single, double = torch.empty(2), torch.empty(2, dtype=torch.float64)
    assert not kernels_available(single)
    monkeypatch.setattr(launch_module, "INTERPRETED", True)
    assert kernels_available(single, None, double)
    assert uses_kernels(single, None)
    assert not uses_kernels(single, double)


def test_partial_sums_fit_a_grid() -> None:
    """They are the second dimension of a grid, which CUDA limits to 65535."""
    meta = torch.device("meta")
    assert num_partial_sums(1000, 1, meta) == 132
    assert num_partial_sums(32_000, 3, meta) == 1000
    assert num_partial_sums(10_000_000, 3, meta) == 65535
