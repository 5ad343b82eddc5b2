"""Kernels in Triton's interpreter, in a process of their own: see tests/test_kernels_interpreted.py."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fills what is allocated and not written with NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)
