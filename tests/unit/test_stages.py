"""Layers become stages: their balance, devices and partitions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_fast.stages import checked_placement, partitions_of, resolve_balance, resolve_devices, stages_of

CPU = torch.device("cpu")


def layers(*widths: int) -> list[nn.Module]:
    return [nn.Linear(width, width, bias=False) for width in widths]


def test_the_default_balance_is_by_the_number_of_parameters() -> None:
    assert resolve_balance(layers(4, 4, 4, 12), None, [CPU] * 2) == [3, 1]
    assert resolve_balance(layers(4, 4), None, [CPU] * 3) == [1, 1]
    assert resolve_balance([], None, [CPU]) == []
    assert resolve_balance(layers(4, 4, 4), iter([1, 2])) == [1, 2]


def test_without_devices_there_is_a_partition_for_each_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert resolve_balance(layers(4, 4, 4, 4), None) == [2, 2]
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert resolve_balance(layers(4, 4), None) == [2]


def test_a_balance_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(module: 3, sum of balance: 4\)"):
        resolve_balance(layers(4, 4, 4), [2, 2])


def test_names_and_numbers_are_devices() -> None:
    assert resolve_devices(["cpu", CPU]) == [CPU, CPU]


def test_partitions_are_consecutive_layers() -> None:
    assert list(partitions_of("abcdef", [1, 3, 2])) == [["a"], ["b", "c", "d"], ["e", "f"]]


def test_a_placement_has_a_device_for_each_partition() -> None:
    named = [(str(index), layer) for index, layer in enumerate(layers(4, 4, 4))]
    assert checked_placement(named, [1, 2], [CPU] * 3) == ([1, 2], [CPU, CPU])
    assert checked_placement(named, [3], None) == ([3], [CPU])
    with pytest.raises(IndexError, match=r"devices: 1, partitions: 2"):
        checked_placement(named, [1, 2], [CPU])


def test_stages_count_their_layers_from_the_models_first() -> None:
    model = layers(4, 4, 4, 4)
    stages = stages_of(model, [1, 2, 1], [CPU] * 3, False, torch.float64, fuse=False, own_stages={1})
    assert [stage.first_layer for stage in stages] == [0, 1, 3]
    assert [[*stage.layers] for stage in stages] == [model[:1], model[1:3], model[3:]]
    assert [stage.options.is_remote for stage in stages] == [True, False, True]
    assert {stage.options.grad_dtype for stage in stages} == {torch.float64}
