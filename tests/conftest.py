"""What every test shares: which tests run here, and a fixture that fixes the thread count."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gpipe_fast


def pytest_configure() -> None:
    # A shell's background jobs start with Ctrl-C ignored, and so would the tests of what it does.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def missing_for_cuda() -> str | None:
    """What this machine lacks for a test marked `cuda`, or None."""
    if not torch.cuda.is_available():
        return "no GPU is visible"
    if not gpipe_fast.built_with_cuda():
        return "the extension was built without CUDA"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skips = {"cuda": missing_for_cuda()}
    if os.environ.get("GPIPE_FAST_SOAK") != "1":
        skips["soak"] = "runs with GPIPE_FAST_SOAK=1 (make soak)"
    for item in items:
        for name, reason in skips.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=f"{name}: {reason}"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Runs a test with one intra-op thread; sums depend on how work is divided."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A CUDA runtime that is not there, and the operators for its devices."""
    from fake_cuda.build import build

    return build(tmp_path_factory.mktemp("fake_cuda"))
