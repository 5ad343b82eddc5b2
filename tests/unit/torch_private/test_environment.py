"""The version of the CUDA driver, and the store of the default process group."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

from gpipe_fast.torch_private.environment import cuda_driver_version, default_store


def test_without_cuda_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12080, raising=False)
    assert cuda_driver_version() == 12080
    monkeypatch.delattr(torch._C, "_cuda_getDriverVersion")
    assert cuda_driver_version() == 0


def test_the_store_is_that_of_the_default_group() -> None:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("PyTorch has no gloo")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        store.set("key", "value")
        default_store().set("own", "value")
        assert default_store().num_keys() > 0
    finally:
        dist.destroy_process_group()
