"""Which devices launch kernels and use fused ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_fast import switches
from gpipe_fast.fuse import availability
from gpipe_fast.fuse.availability import fusion_of, loader_of, why_unfused, with_user_launches
from tests.stages import trace_joint

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_only_gpus_are_fused_and_absent_ones_without_compiling() -> None:
    assert loader_of(CPU) is None
    assert fusion_of(CPU) is fusion_of(CPU, is_absent=True) is None
    found = fusion_of(GPU, is_absent=True)
    assert found is not None
    assert fusion_of(GPU, is_absent=True) is found
    with switches.disabled("fuse"):
        assert fusion_of(GPU, is_absent=True) is None


def test_every_reason_is_a_clause(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_unfused(CPU) == "the stage is on the CPU, where PyTorch's operators run"
    assert why_unfused(GPU, enabled=False) == "the model has fuse=False"
    with switches.disabled("fuse"):
        assert why_unfused(GPU) == "GPIPE_FAST_DISABLE contains 'fuse'"
    assert why_unfused(GPU, is_absent=True) is None
    monkeypatch.setattr(availability, "loader_of", lambda device: None)
    assert str(why_unfused(GPU)).startswith("kernels need CUDA 12.8")
    with monkeypatch.context() as patched:
        patched.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert why_unfused(GPU) == "only deterministic algorithms are allowed"
    monkeypatch.setattr(availability, "has_triton", lambda: False)
    assert why_unfused(GPU, is_absent=True) == "the package triton is not installed"


@pytest.mark.parametrize(("capability", "is_fused"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_old_gpus_launch_kernels_and_are_not_fused(
    capability: tuple[int, int], is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader: Any = SimpleNamespace(capability=capability)
    monkeypatch.setattr(availability, "loader_of", lambda device: loader)
    monkeypatch.setattr(availability, "_fusion", lambda loader: "fusion")
    assert (fusion_of(GPU) == "fusion") == is_fused


@pytest.mark.parametrize(
    ("cuda", "loads"), [("none", False), ("12.6", False), ("12.8", True), ("12.10", True), ("13.0", True)]
)
def test_kernels_are_loaded_by_new_runtimes_alone(
    cuda: str, loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(availability, "build_info", lambda: {"cuda": cuda})
    monkeypatch.setattr(availability, "_loader", lambda device: "loader")
    availability._loads_kernels.cache_clear()
    try:
        assert (loader_of(GPU) == "loader") == loads
        monkeypatch.setattr(availability, "has_triton", lambda: False)
        assert loader_of(GPU) is None
    finally:
        availability._loads_kernels.cache_clear()


def test_a_graph_without_triton_calls_is_unchanged() -> None:
    joint = trace_joint([nn.Linear(2, 2)], torch.randn(3, 2))
    assert with_user_launches(joint, CPU) is joint
    assert with_user_launches(joint, GPU, is_absent=True) is joint
