"""What launchers of all kernels share, without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gpipe_fast.kernels import launch as launching
from gpipe_fast.kernels.launch import Config, has_kernels, launch, runs_kernels


def test_kernels_run_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []

    @contextlib.contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        events.append(tensor.device)
        yield
        events.append("left")

    def wrapped(kernel: object) -> dict[tuple[int], object]:
        return {(1,): lambda *_, **__: events.append(kernel)}

    monkeypatch.setattr(launching, "wrap_triton", wrapped)
    launch("kernel", (1,), Config({}), 3, torch.empty(2, device="meta"))
    assert events == ["kernel"]
    # Where CUDA is in use there may be several devices.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    launch("kernel", (1,), Config({}), 3, torch.empty(2, device="meta"))
    assert events[1:] == [torch.device("meta"), "kernel", "left"]


def test_where_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    single, double = torch.empty(2), torch.empty(2, dtype=torch.float64)
    assert not has_kernels(single)
    monkeypatch.setattr(launching, "INTERPRETED", True)
    assert has_kernels(single, None, double)
    assert runs_kernels(single, None)
    assert not runs_kernels(single, double)
