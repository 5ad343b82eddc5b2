"""Hooks that select the comparisons to run, and fixtures that allocate on the tested device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpipe_fast.kernels.launch import INTERPRETED
from tests.fake_cuda import bfloat16, pairwise
from tests.sampling import sample
from tests.unit.kernels.numerics.comparison import DEVICE

if INTERPRETED:
    import triton.language as tl
    from triton.runtime import interpreter

    pairwise.correct(interpreter)
    bfloat16.correct(interpreter, tl)

# Parametrizations of each test function in a sample.
SAMPLES_PER_FUNCTION = 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests that GPIPE_FAST_KERNELS_SHARE names: 'sample', or 'rest' for all others."""
    if DEVICE == "cuda":
        for item in items:
            item.add_marker("cuda")
    share = os.environ.get("GPIPE_FAST_KERNELS_SHARE")
    if share is None:
        return
    by_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    sampled = {
        item for name, group in by_function.items() for item in sample(group, SAMPLES_PER_FUNCTION, salt=name)
    }
    left_out = [item for item in items if (item in sampled) != (share == "sample")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if (item in sampled) == (share == "sample")]


@pytest.fixture(autouse=True)
def nan_filled_allocations(one_thread: None) -> Iterator[None]:
    """Makes the tested device the default, and fills uninitialised memory with NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    # Some of the PyTorch operators in the comparisons have no deterministic implementation on GPUs.
    torch.use_deterministic_algorithms(True, warn_only=DEVICE == "cuda")
    torch.set_default_device(DEVICE)
    torch.manual_seed(0)
    yield
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=INTERPRETED, scope="session")
def patch_interpreter_once() -> Iterator[None]:
    """Makes Triton's interpreter patch triton.language once per device function instead of at every call.

    The interpreter leaves the module of a device function patched, so the first patch is enough. The
    repeated ones took a third of the time of these tests.
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
