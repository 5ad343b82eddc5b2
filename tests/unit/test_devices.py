"""Where stages are if nothing is said, and what fits there: as if there were GPUs.

What needs one is in tests/fake_cuda/test_memory.py.
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
from gpipe_fast.balance.capacity import check_all_fit
from tests.inside import disturb_no_more, plant_failure

Visible = Callable[[int], None]


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> Visible:
    """Lets a number of devices be those that are taken by default."""
    return lambda number: monkeypatch.setattr(
        devices, "default_devices", lambda: [torch.device("cpu")] * number or None
    )


def layers(number: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(number)))


def test_as_many_partitions_as_devices(visible: Visible) -> None:
    visible(3)
    assert GPipe(layers(6)).balance == [2, 2, 2]
    assert len(GPipe(layers(6), [1, 5]).devices) == 2, "those left over are dropped"
    assert GPipe(layers(2)).balance == [1, 1]


def test_too_few_devices(visible: Visible) -> None:
    visible(1)
    with pytest.raises(IndexError, match=r"too few devices .* \(devices: 1, partitions: 2\)"):
        GPipe(layers(2), [1, 1])


def test_devices_that_are_given_count_alone(visible: Visible) -> None:
    visible(1)
    assert GPipe(layers(4), devices=["cpu"] * 2).balance == [2, 2]


@pytest.mark.parametrize("device", ["meta", "mps", "xpu:1"])
def test_other_devices_than_cpu_and_cuda_are_refused(device: str) -> None:
    message = (
        f"stages run on CPU and CUDA devices, got {device}; pass devices such as ['cuda:0', 'cuda:1'] or "
        "['cpu', 'cpu'], or devices=None for all visible GPUs, or the CPU if there are none"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        GPipe(layers(4), devices=["cpu", device])


def test_without_gpus_stages_are_on_the_cpu(visible: Visible, monkeypatch: pytest.MonkeyPatch) -> None:
    visible(0)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    pipe = GPipe(layers(6))
    assert pipe.balance == [2, 2, 2]
    assert pipe.devices == [torch.device("cpu")] * 3
    assert len(GPipe(layers(6), [1] * 6).devices) == 6


def test_the_gpus_that_are_visible() -> None:
    """In a process of its own, since this one's tests are kept from GPUs."""
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
    """Lets a GPU have so many bytes, of which so many are free."""

    def set_memory(total: int, free: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))

    return set_memory


def partition(width: int = 1024) -> list[tuple[str, nn.Module]]:
    """4 MiB of parameters."""
    return [("0", nn.Linear(width, width, bias=False))]


MIB = 1 << 20


def test_stages_of_one_gpu_add_up(memory: Callable[[int, int], None]) -> None:
    memory(16 * MIB, 16 * MIB)
    check_all_fit([partition(), partition()], [GPU, GPU])
    memory(15 * MIB, 15 * MIB)
    check_all_fit([partition(), partition()], [GPU, torch.device("cuda:1")])
    with pytest.raises(ValueError, match=r"stages 0, 1 need 0\.0 GiB for parameters, .* and cuda:0 has 0\.0"):
        check_all_fit([partition(), partition()], [GPU, GPU])
    check_all_fit([partition(), partition()], [torch.device("cpu")] * 2)


def test_a_shared_layer_counts_once(memory: Callable[[int, int], None]) -> None:
    memory(8 * MIB, 8 * MIB)
    shared = partition()
    check_all_fit([shared, shared], [GPU, GPU])


def test_what_is_moved_must_be_free(memory: Callable[[int, int], None]) -> None:
    memory(16 * MIB, 4 * MIB)
    check_all_fit([partition()], [GPU])
    memory(16 * MIB, 4 * MIB - 1)
    with pytest.raises(ValueError, match=r"stages 0 move 0\.0 GiB .* to cuda:0, which has 0\.0 GiB free of"):
        check_all_fit([partition()], [GPU])


def test_a_planted_lack_of_memory_says_who_holds_what() -> None:
    """The type stays; the next call works."""
    pipe = GPipe(layers(4), [2, 2], devices=["cpu"] * 2, chunks=4)
    x = torch.randn(8, 4)
    pipe(x).sum().backward()
    for action, step in (("1F2", lambda: pipe(x)), ("0B1", lambda: pipe(x).sum().backward())):
        plant_failure(pipe, action, "OutOfMemoryError", after=1)
        message = (
            rf"injected OutOfMemoryError \(in action {action}: .*; stage {action[0]} on cpu holds 160 bytes "
            r"of parameters, .* 32 bytes of boundary tensors for each of 4 micro-batches "
            r"\(128 bytes in total\)"
        )
        with pytest.raises(torch.OutOfMemoryError, match=message):
            step()
        disturb_no_more(pipe)
        pipe(x).sum().backward()


@pytest.mark.parametrize("action", ["1F2", "0B1"])
def test_an_error_of_a_gpu_stays_one(action: str) -> None:
    pipe = GPipe(layers(4), [2, 2], devices=["cpu"] * 2, chunks=4)
    plant_failure(pipe, action, "AcceleratorError", after=1)
    with pytest.raises(
        torch.AcceleratorError, match=rf"injected AcceleratorError \(in action {action}: stage"
    ):
        pipe(torch.randn(8, 4)).sum().backward()
    disturb_no_more(pipe)
    pipe(torch.randn(8, 4)).sum().backward()
