"""Default devices of stages, on simulated GPUs.

Tests that need a GPU are in tests/fake_cuda/test_placement.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe, devices
from tests.programs import run_python


def set_visible(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Sets the number of default devices."""
    monkeypatch.setattr(devices, "default_devices", lambda: [torch.device("cpu")] * number or None)


def layers(number: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(number)))


def test_the_default_balance_has_a_partition_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is by the number of parameters."""
    set_visible(monkeypatch, 3)
    assert GPipe(layers(6)).balance == [2, 2, 2]
    assert GPipe(nn.Sequential(*layers(3), nn.Linear(40, 40)), devices=["cpu"] * 2).balance == [3, 1]
    assert len(GPipe(layers(6), [1, 5]).devices) == 2, "surplus devices are dropped"
    assert GPipe(layers(2)).balance == [1, 1]
    set_visible(monkeypatch, 1)
    with pytest.raises(IndexError, match=r"too few devices .* \(devices: 1, partitions: 2\)"):
        GPipe(layers(2), [1, 1])
    assert GPipe(layers(4), devices=["cpu"] * 2).balance == [2, 2], "given devices replace them"


def test_without_gpus_stages_are_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    set_visible(monkeypatch, 0)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    pipe = GPipe(layers(6))
    assert (pipe.balance, pipe.devices) == ([2, 2, 2], [torch.device("cpu")] * 3)
    assert len(GPipe(layers(6), [1] * 6).devices) == 6


def test_the_default_devices_are_the_visible_gpus() -> None:
    """Runs in a new process, because this one hides GPUs from tests."""
    program = """
import torch
from gpipe_fast.devices import default_devices
for number in (0, 2):
    torch.cuda.device_count = lambda: number
    print(default_devices())
"""
    done = run_python("-c", program)
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert done.stdout.splitlines() == ["None", str(gpus)], done.stderr
