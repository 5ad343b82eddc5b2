"""Default devices of stages, and the check that stages fit into memory, on simulated GPUs.

Tests that need a GPU are in tests/fake_cuda/test_placement.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe, devices
from gpipe_fast.balance.device_memory import check_partitions_fit
from tests.internals import inject_failure, remove_faults

SetVisible = Callable[[int], None]


@pytest.fixture
def set_visible(monkeypatch: pytest.MonkeyPatch) -> SetVisible:
    """Returns a function that sets the number of default devices."""
    return lambda number: monkeypatch.setattr(
        devices, "default_devices", lambda: [torch.device("cpu")] * number or None
    )


def layers(number: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(number)))


def test_the_default_balance_has_a_partition_for_each_device(set_visible: SetVisible) -> None:
    set_visible(3)
    assert GPipe(layers(6)).balance == [2, 2, 2]
    assert len(GPipe(layers(6), [1, 5]).devices) == 2, "surplus devices are dropped"
    assert GPipe(layers(2)).balance == [1, 1]


def test_too_few_default_devices_are_refused(set_visible: SetVisible) -> None:
    set_visible(1)
    with pytest.raises(IndexError, match=r"too few devices .* \(devices: 1, partitions: 2\)"):
        GPipe(layers(2), [1, 1])


def test_given_devices_replace_the_default_devices(set_visible: SetVisible) -> None:
    set_visible(1)
    assert GPipe(layers(4), devices=["cpu"] * 2).balance == [2, 2]


@pytest.mark.parametrize("device", ["meta", "mps", "xpu:1"])
def test_other_devices_than_cpu_and_cuda_are_refused(device: str) -> None:
    message = (
        f"stages run on CPU and CUDA devices, got {device}; pass devices such as ['cuda:0', 'cuda:1'] or "
        "['cpu', 'cpu'], or devices=None for all visible GPUs, or the CPU if there are none"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        GPipe(layers(4), devices=["cpu", device])


def test_without_gpus_stages_are_on_the_cpu(set_visible: SetVisible, monkeypatch: pytest.MonkeyPatch) -> None:
    set_visible(0)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    pipe = GPipe(layers(6))
    assert pipe.balance == [2, 2, 2]
    assert pipe.devices == [torch.device("cpu")] * 3
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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert done.stdout.splitlines() == ["None", str(gpus)], done.stderr


GPU = torch.device("cuda:0")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Returns a function that sets the total and the free bytes of GPU memory."""

    def set_memory(total: int, free: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))

    return set_memory


def partition(width: int = 1024) -> list[tuple[str, nn.Module]]:
    """Returns a partition with 4 MiB of parameters."""
    return [("0", nn.Linear(width, width, bias=False))]


MIB = 1 << 20


def test_memory_of_stages_on_one_gpu_adds_up(memory: Callable[[int, int], None]) -> None:
    memory(16 * MIB, 16 * MIB)
    check_partitions_fit([partition(), partition()], [GPU, GPU])
    memory(15 * MIB, 15 * MIB)
    check_partitions_fit([partition(), partition()], [GPU, torch.device("cuda:1")])
    with pytest.raises(ValueError, match=r"stages 0, 1 need 0\.0 GiB for parameters, .* and cuda:0 has 0\.0"):
        check_partitions_fit([partition(), partition()], [GPU, GPU])
    check_partitions_fit([partition(), partition()], [torch.device("cpu")] * 2)


def test_memory_of_a_shared_layer_counts_once(memory: Callable[[int, int], None]) -> None:
    memory(8 * MIB, 8 * MIB)
    shared = partition()
    check_partitions_fit([shared, shared], [GPU, GPU])


def test_moved_parameters_must_fit_into_free_memory(memory: Callable[[int, int], None]) -> None:
    memory(16 * MIB, 4 * MIB)
    check_partitions_fit([partition()], [GPU])
    memory(16 * MIB, 4 * MIB - 1)
    with pytest.raises(ValueError, match=r"stages 0 move 0\.0 GiB .* to cuda:0, which has 0\.0 GiB free of"):
        check_partitions_fit([partition()], [GPU])


def test_an_injected_out_of_memory_error_reports_memory_use() -> None:
    """The error keeps its type, and the next call works."""
    pipe = GPipe(layers(4), [2, 2], devices=["cpu"] * 2, chunks=4)
    x = torch.randn(8, 4)
    pipe(x).sum().backward()
    for action, step in (("1F2", lambda: pipe(x)), ("0B1", lambda: pipe(x).sum().backward())):
        inject_failure(pipe, action, "OutOfMemoryError", after=1)
        message = (
            rf"injected OutOfMemoryError \(in action {action}: .*; stage {action[0]} on cpu holds 160 bytes "
            r"of parameters, .* 32 bytes of boundary tensors for each of 4 micro-batches "
            r"\(128 bytes in total\)"
        )
        with pytest.raises(torch.OutOfMemoryError, match=message):
            step()
        remove_faults(pipe)
        pipe(x).sum().backward()


@pytest.mark.parametrize("action", ["1F2", "0B1"])
def test_an_injected_gpu_error_keeps_its_type(action: str) -> None:
    pipe = GPipe(layers(4), [2, 2], devices=["cpu"] * 2, chunks=4)
    inject_failure(pipe, action, "AcceleratorError", after=1)
    with pytest.raises(
        torch.AcceleratorError, match=rf"injected AcceleratorError \(in action {action}: stage"
    ):
        pipe(torch.randn(8, 4)).sum().backward()
    remove_faults(pipe)
    pipe(torch.randn(8, 4)).sum().backward()
