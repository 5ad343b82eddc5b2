"""What every test shares: which tests run here, and a fixture that fixes the thread count."""

import functools
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

import gpipe_fast
import gpipe_fast.devices


def pytest_configure() -> None:
    # A shell's background jobs start with Ctrl-C ignored, and so would the tests of what it does.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.cache
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Where there are GPUs, only tests marked `cuda` use them by default, and so in processes they start."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("cuda") is None:
            patch.setattr(gpipe_fast.devices, "default_devices", lambda: None)
            if missing_for_cuda() is None:  # so CUDA has read the variable, in this process
                patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return (yield)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Runs a test with one intra-op thread; sums depend on how work is divided."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """PyTorch's deterministic algorithms, and no TF32; nothing is left under way on a GPU."""
    cudnn = torch.backends.cudnn
    with cudnn.flags(enabled=cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=False):
        torch.use_deterministic_algorithms(True)
        yield
        torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A CUDA runtime that is not there, and the operators for its devices."""
    from tests.fake_cuda.build import build

    return build(tmp_path_factory.mktemp("fake_cuda"))
