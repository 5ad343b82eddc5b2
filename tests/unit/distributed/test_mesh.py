"""The device of a process's stage, on simulated GPUs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gpipe_fast.distributed.mesh import default_kind, own_device
from tests.distributed.launch import needs_gloo

pytestmark = needs_gloo


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes four GPUs visible, of which the last is current."""
    for name, value in (("is_available", True), ("device_count", 4), ("current_device", 3)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("devices", "kind", "expected"),
    [
        (None, "cpu", "cpu"),
        (None, "cuda", "cuda:3"),
        ("cuda", "cpu", "cuda:3"),
        ("cpu", "cuda", "cpu"),
        (2, "cpu", "cuda:2"),
        (torch.device("cuda", 1), "cpu", "cuda:1"),
        (["cuda:0", "cuda:2"], "cpu", "cuda:2"),
        (["cpu", "cuda"], "cpu", "cuda:3"),
    ],
)
def test_the_device_of_the_second_of_two_ranks(devices: Any, kind: str, expected: str) -> None:
    assert own_device(devices, kind, rank=1, num_ranks=2) == torch.device(expected)


@pytest.mark.usefixtures("four_gpus")
def test_a_missing_gpu_is_refused() -> None:
    """Those of other ranks may be on other machines."""
    with pytest.raises(ValueError, match="there is no cuda:4, since 4 GPUs are visible"):
        own_device(["cuda:0", "cuda:4"], "cpu", rank=1, num_ranks=2)
    assert own_device(["cuda:0", "cuda:4"], "cpu", rank=0, num_ranks=2) == torch.device("cuda:0")


def group(**backends: str) -> Any:
    def backend_of(device: torch.device) -> Any:
        found = mock.Mock()
        found.name.return_value = backends[device.type]
        return found

    types = [torch.device(kind) for kind in backends]
    return mock.Mock(spec=dist.ProcessGroup, _device_types=types, _get_backend=backend_of)


def test_a_group_of_nccl_has_stages_on_gpus() -> None:
    assert default_kind(group(cpu="gloo", cuda="gloo")) == "cpu"
    assert default_kind(group(cpu="gloo", cuda="nccl")) == "cuda"
    assert default_kind(group(cuda="nccl")) == "cuda"
    for kind in ("cpu", "cuda"):
        assert default_kind(mock.Mock(device_type=kind)) == kind
