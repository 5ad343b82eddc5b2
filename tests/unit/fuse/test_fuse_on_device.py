"""Fusion of a stage: kernels that do not compile are left out, and the stage is fused again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.fuse import left_out
from gpipe_fast.fuse.fuse import Fusion
from gpipe_fast.lower.launch import KernelLaunch
from tests.unit.fuse.graphs import Function, stage_of


class Loader:
    """Stands in for a loader, for which the first kernels that it sees do not compile."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def failures(self, launches: Sequence[KernelLaunch]) -> list[str]:
        self.asked.append([launch.name for launch in launches])
        return ["it does not compile" if len(self.asked) == 1 else ""] * len(launches)


@pytest.fixture(autouse=True)
def nothing_left_out() -> Iterator[None]:
    left_out.forget()
    yield
    left_out.forget()


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x + x.sin(), (64,))


def graphs() -> tuple[Any, Any]:
    _, forward, backward = stage_of([Function(norm)], torch.randn(32, 64))
    return forward, backward


def test_a_device_that_is_absent_compiles_nothing() -> None:
    forward, backward = graphs()
    found = Fusion(None).fuse(forward, backward)
    assert [bool(each.launches()) for each in found] == [True, True]
    assert len(Fusion(None).fuse(forward, None)) == 1


def test_kernels_that_do_not_compile_are_left_out() -> None:
    loader: Any = Loader()
    found = Fusion(loader).fuse(*graphs())
    assert len(loader.asked) == 2
    first, second = loader.asked
    assert first
    assert not set(first) & set(second)
    assert sorted(set(first)) == left_out.names()
    assert all("it does not compile" in warning for warning in left_out.pending)
    assert {launch.name for each in found for launch in each.launches()} == set(second)
