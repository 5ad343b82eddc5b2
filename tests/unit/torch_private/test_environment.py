"""The version of the CUDA driver, and the store of the default process group."""

from __future__ import annotations

import pytest
import torch

from gpipe_fast.torch_private.environment import cuda_driver_version


def test_without_cuda_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12080, raising=False)
    assert cuda_driver_version() == 12080
    monkeypatch.delattr(torch._C, "_cuda_getDriverVersion")
    assert cuda_driver_version() == 0
