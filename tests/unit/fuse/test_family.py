"""Cases of a family: their pattern is traced once, and their launcher once for each layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gpipe_fast.fuse.family import FORWARDS, Case
from gpipe_fast.fuse.launchers import CannotLaunch, launches_in
from gpipe_fast.kernels.launch import Config, launch
from tests.unit.fuse.triton_kernels import double

calls: list[Mapping[str, Any]] = []


def doubled(numbers: Mapping[str, Any], x: Tensor) -> tuple[Tensor]:
    calls.append(numbers)
    if x.dim() != 2:
        raise CannotLaunch("no matrix")
    y = torch.empty_like(x)
    launch(double, (1,), Config({"BLOCK": 32}), x, y, x.numel())
    return (y,)


def case() -> Case:
    calls.clear()
    arguments = (((2, 3), torch.float32),)
    return Case("doubled", lambda x: x + x, arguments, doubled, torch.ops.aten.add.Tensor, FORWARDS)


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def test_a_fragment_is_traced_once_for_each_layout_and_number() -> None:
    own = case()
    fragment = own.fragment({"n": 1}, [meta(4, 8)])
    assert fragment is not None
    assert len(launches_in(fragment)) == 1
    assert own.fragment({"n": 1}, [meta(4, 8)]) is fragment
    assert len(calls) == 1
    for numbers, x in (({"n": 2}, meta(4, 8)), ({"n": 1}, meta(8, 4)), ({"n": 1}, meta(8, 4).t())):
        assert own.fragment(numbers, [x]) is not fragment
    assert len(calls) == 4


def test_a_launcher_that_cannot_launch_has_no_fragment() -> None:
    own = case()
    assert own.fragment({}, [meta(4)]) is None
    assert own.fragment({}, [meta(4)]) is None
    assert len(calls) == 1


def test_the_pattern_is_traced_once() -> None:
    own = case()
    assert own.traced is own.traced
