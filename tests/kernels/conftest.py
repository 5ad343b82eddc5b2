"""Kernels where comparison.py says, in processes of their own (operators/test_families.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.comparison import DEVICE

collect_ignore_glob = [] if DEVICE else ["test_*.py"]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Tests allocate where kernels are tested; fills what is allocated and not written with NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    # Some of PyTorch's operators that kernels are compared with cannot be deterministic on a GPU.
    torch.use_deterministic_algorithms(True, warn_only=DEVICE == "cuda")
    torch.set_default_device(DEVICE)
    torch.manual_seed(0)
    yield
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
