"""GPipe as a container: its current balance and devices; layers cannot be changed by position."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from tests.models import features, mlp, noisy
from tests.reference import loop_step, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")


def test_assigning_a_balance_repartitions_the_layers() -> None:
    pipe, x = GPipe(noisy(), [2, 4], chunks=4), features()
    expected = loop_step(nn.Sequential(*pipe), x, 4)
    for balance in ([4, 2], [1, 2, 3], [6], torch.tensor([3, 3])):
        pipe.balance = balance  # type: ignore[assignment]
        assert pipe.balance == list(balance)
        assert [len(partition) for partition in pipe.partitions] == pipe.balance
        assert pipe.devices == [torch.device("cpu")] * len(balance)
        assert unequal(pipeline_step(pipe, x), expected) == []
        with pipe.recording() as recording:
            pipe(x)
        assert len(recording.stages) == len(balance)
    pipe.balance.append(3)  # of a copy
    pipe.devices.clear()
    assert (pipe.balance, pipe.devices) == ([3, 3], [torch.device("cpu")] * 2)


def test_a_pending_backward_keeps_the_balance_of_its_forward() -> None:
    pipe, x = GPipe(mlp(), [2, 3], chunks=4), features()
    pipe(x).sum().backward()
    expected = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
    pipe.zero_grad()
    y = pipe(x)
    pipe.balance = [1, 2, 2]
    y.sum().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(pipe.parameters(), expected, strict=True))


def test_assigning_a_balance_cancels_the_automatic_measurement() -> None:
    pipe = GPipe(mlp(), devices=["cpu"] * 2, chunks=8)
    pipe.balance = [4, 1]
    pipe(features())
    assert pipe.balance == [4, 1]


def test_an_added_layer_needs_a_new_balance() -> None:
    pipe, x = GPipe(mlp(), [2, 3], chunks=4), features()
    pipe.add_module("5", nn.ReLU())
    with pytest.raises(ValueError, match=r"\(module: 6, sum of balance: 5\)"):
        pipe(x)
    pipe.balance = [3, 3]
    assert unequal(pipeline_step(pipe, x), loop_step(nn.Sequential(*pipe), x, 4)) == []


def test_assigning_devices_moves_the_stages() -> None:
    """An invalid balance, and invalid devices, are refused and change nothing."""
    pipe, x = GPipe(mlp(), [2, 3], chunks=4), features()
    expected = loop_step(nn.Sequential(*pipe), x, 4)
    pipe.devices = ["cpu"] * 3  # type: ignore[list-item]
    assert pipe.devices == [torch.device("cpu")] * 2
    pipe.balance = [1, 1, 3]  # one stage for each given device
    assert unequal(pipeline_step(pipe, x), expected) == []
    for name, value, error, message in (
        ("balance", [1, 1], ValueError, r"\(module: 5, sum of balance: 2\)"),
        ("balance", [1, 1, 1, 2], IndexError, r"\(devices: 3, partitions: 4\)"),
        ("devices", ["cpu"], IndexError, r"\(devices: 1, partitions: 3\)"),
        ("devices", ["meta"] * 3, ValueError, "stages run on CPU and CUDA devices, got meta"),
    ):
        with pytest.raises(error, match=message):
            setattr(pipe, name, value)
    assert unequal(pipeline_step(pipe, x), expected) == []


def test_the_number_of_stages_is_fixed_during_a_recording() -> None:
    """Layers may still move to another stage."""
    pipe, x = GPipe(mlp(), [2, 3], chunks=4), features()
    with pipe.recording() as recording:
        pipe.balance = [1, 4]
        with pytest.raises(RuntimeError, match="added, removed or moved while the model is recorded"):
            pipe.balance = [1, 2, 2]
        pipe(x)
    assert recording.phases()[0].num_stages == 2
    assert pipe.balance == [1, 4]


def test_changing_layers_by_position_is_refused() -> None:
    pipe = GPipe(mlp(), [2, 3])
    before = list(pipe)
    changes: list[Callable[[], object]] = [
        lambda: pipe.__setitem__(0, nn.ReLU()),
        lambda: pipe.__delitem__(2),
        lambda: pipe.append(nn.ReLU()),
        lambda: pipe.insert(0, nn.ReLU()),
        lambda: pipe.extend([nn.ReLU()]),
        lambda: pipe.pop(),
    ]
    for change in changes:
        with pytest.raises(TypeError, match=r"create a new GPipe from .*GPipe\(nn.Sequential\(\*layers\)"):
            change()
    assert list(pipe) == before
