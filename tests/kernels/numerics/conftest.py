"""Where kernels are compared with PyTorch, as comparison.py says, and which share of the comparisons runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpipe_fast.kernels.launch import INTERPRETED
from tests.kernels.numerics.comparison import DEVICE
from tests.sampling import sample

# How many parametrizations of each test function the sample has.
SAMPLED = 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the share that GPIPE_FAST_KERNELS_SHARE names: 'sample', or 'rest', which is all others."""
    share = os.environ.get("GPIPE_FAST_KERNELS_SHARE")
    if share is None:
        return
    by_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    sampled = {item for name, group in by_function.items() for item in sample(group, SAMPLED, salt=name)}
    left_out = [item for item in items if (item in sampled) != (share == "sample")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if (item in sampled) == (share == "sample")]


@pytest.fixture(autouse=True)
def poisoned(one_thread: None) -> Iterator[None]:
    """Tests allocate where kernels are tested; fills what is allocated and not written with NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    # Some of PyTorch's operators that kernels are compared with cannot be deterministic on a GPU.
    torch.use_deterministic_algorithms(True, warn_only=DEVICE == "cuda")
    torch.set_default_device(DEVICE)
    torch.manual_seed(0)
    yield
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=INTERPRETED, scope="session")
def patched_once() -> Iterator[None]:
    """Triton's interpreter patches triton.language for each call of a device function; here, for the first.

    It leaves what a device function's module needs patched, so the first call is enough. The others took a
    third of the time of these tests.
    """
    from triton.runtime import interpreter

    patched = set()

    def call(self: Any, *arguments: Any, **more: Any) -> Any:
        if self.fn not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn)
        return self.rewrite()(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        yield
