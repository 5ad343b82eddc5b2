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
    launch,
    num_multiprocessors,
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
    assert not uses_kernels(single)
    monkeypatch.setattr(launch_module, "INTERPRETED", True)
    assert uses_kernels(single, None)
    assert not uses_kernels(single, double)


@pytest.mark.parametrize(
    ("rows", "col_blocks", "warps", "programs"),
    [
        (8192, 1, 4, 4 * 132),  # 16 rows for each partial sum
        (1 << 20, 1, 4, 8 * 132),  # 32 warps for each multiprocessor
        (1 << 20, 1, 16, 2 * 132),
        (8192, 16, 4, 66),  # 8 programs for each multiprocessor, of which 66 share rows
        (1000, 1, 4, 132),  # one for each multiprocessor, though partial sums are of few rows
        (8192, 5000, 4, 1),
    ],
)
def test_programs_with_partial_sums_fill_the_multiprocessors(
    rows: int, col_blocks: int, warps: int, programs: int
) -> None:
    assert num_partial_sums(rows, col_blocks, warps, torch.device("meta")) == programs


def test_a_gpu_that_the_machine_lacks_has_the_assumed_multiprocessors() -> None:
    assert num_multiprocessors(torch.device("cuda", 63)) == 132
