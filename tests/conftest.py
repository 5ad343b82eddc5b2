"""Hooks that select the tests to run, and fixtures for all tests."""

import functools
import importlib.util
import os
import re
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gpipe_fast
import gpipe_fast.devices
from gpipe_fast.arguments import warn_idle_stages
from tests.sampling import sample, seed

# The markers of the tests in each tier; "" stands for tests without a marker.
TIERS = {
    "check": {""},
    "test": {"", "slow in check"},
    "slow": {"slow"},
    "ci": {"", "slow in check", "slow"},
    "rest": {"extended"},
    "all": {"", "slow in check", "slow", "extended"},
    "soak": {"", "slow in check", "slow", "extended", "soak"},
}
SLOW = Path(__file__).parent / "slow.txt"
DESELECTED = pytest.StashKey[Counter[str]]()
# CPU-only builds of torch come without Triton.
HAS_TRITON = importlib.util.find_spec("triton") is not None
NEED_TRITON = [
    "bench",
    "tools",
    "docs/test_kernel.py",
    "unit/reports/test_expla*",
    "unit/fuse/regions",
    "unit/fuse/test_[!c]*",  # all but test_casts.py
    "unit/fuse/test_c[!a]*",
    "unit/kernels",
    "unit/lower/test_launch.py",
    "unit/lower/test_work.py",
]
# Tests fuse small shapes, also in processes of their own.
os.environ["GPIPE_FAST_MIN_REGION_BYTES"] = "0"
collect_ignore_glob = [] if HAS_TRITON else NEED_TRITON


def pytest_configure() -> None:
    # Background jobs of a shell ignore SIGINT; the tests of Ctrl-C need the default handler.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.cache
def missing_for_cuda() -> str | None:
    """Returns what this machine lacks for tests marked `cuda`, or None."""
    if not torch.cuda.is_available():
        return "no GPU is visible"
    return None if gpipe_fast.built_with_cuda() else "the extension was built without CUDA"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=TIERS,
        default="test",
        help="test (default): the tests of `make test`; check: fewer; slow: what CI runs in addition "
        "(tests/slow.txt); ci: both; rest: the longer tests; all: all of these; soak: also the long runs",
    )


@functools.cache
def slow_functions() -> dict[str, str]:
    """Returns a marker for each test function in tests/slow.txt."""
    markers, found = {"[test]": "slow", "[check]": "slow in check"}, dict[str, str]()
    for line in SLOW.read_text().splitlines():
        if line in markers:
            marker = markers[line]
        elif "::" in line:
            found[line] = marker
    return found


def _marker(item: pytest.Item) -> str:
    """Returns the marker that excludes a test from `make check`; '' if none does."""
    marked = next((name for name in ("soak", "extended") if item.get_closest_marker(name)), "")
    return marked or slow_functions().get(re.split(r"[\[@]", item.nodeid)[0], "")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if missing_for_cuda() and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason=f"cuda: {missing_for_cuda()}"))
        elif item.get_closest_marker("sampled") and _marker(item) not in ("extended", "soak"):
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, group in groups.items():
        mark = group[0].get_closest_marker("sampled")
        assert mark is not None
        drawn = {item.nodeid for item in sample(group, *mark.args, salt=name)}
        for item in group:
            if item.nodeid not in drawn:
                item.add_marker(pytest.mark.extended)
    wanted = TIERS[config.getoption("--tier")]
    if config.args_source is pytest.Config.ArgsSource.ARGS and any("::" in arg for arg in config.args):
        return  # tests named on the command line always run
    deselected = [item for item in items if _marker(item) not in wanted]
    items[:] = [item for item in items if _marker(item) in wanted]
    config.hook.pytest_deselected(items=deselected)
    config.stash[DESELECTED] = Counter(map(_marker, deselected))
    if hasattr(config, "workeroutput"):
        config.workeroutput["deselected"] = dict(config.stash[DESELECTED])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Copies the counts from a pytest-xdist worker; all workers deselect the same tests."""
    node.config.stash[DESELECTED] = Counter(getattr(node, "workeroutput", {}).get("deselected", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    deselected = config.stash.get(DESELECTED, Counter())
    skipped = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())]
    numbers = {
        "slow tests that CI runs (--tier=slow)": deselected["slow"],
        "longer tests (--tier=rest)": deselected["extended"],
        "tests of `make test`": deselected[""] + deselected["slow in check"],
        "long runs of `make soak`": deselected["soak"],
        f"tests that need a GPU ({missing_for_cuda()})": sum("cuda: " in reason for reason in skipped),
        f"folders and files that need Triton ({', '.join(NEED_TRITON)})": len(collect_ignore_glob),
    }
    if lines := [f"{number} {what}" for what, number in numbers.items() if number]:
        terminalreporter.write_line(
            f"not run: {'; '.join(lines)}. Samples are drawn with GPIPE_FAST_SEED={seed()}"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hides GPUs from tests not marked `cuda`, and from the processes that such tests start."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("cuda") is None:
            patch.setattr(gpipe_fast.devices, "default_devices", lambda: None)
            if missing_for_cuda() is None:
                torch.cuda.init()
                torch.cuda.device_count()  # keeps the number, so the variable does not hide them here
                patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return (yield)


@pytest.fixture
def fresh_warnings() -> Iterator[None]:
    """Resets, before and after a test, the warning about idle stages, which is given once per process."""
    warn_idle_stages.cache_clear()
    yield
    warn_idle_stages.cache_clear()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Runs a test with one intra-op thread, because sums depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Enables deterministic algorithms, disables TF32, and synchronises the GPU after the test."""
    cudnn = torch.backends.cudnn
    with cudnn.flags(enabled=cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=False):
        torch.use_deterministic_algorithms(True)
        yield
        torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()


@pytest.fixture(scope="session")
def libraries() -> tuple[Path, Path]:
    """Returns the paths of the fake CUDA runtime and of the operators for its devices."""
    from tests.fake_cuda.build import build

    return build()
