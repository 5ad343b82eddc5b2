"""What every test shares: which tests run here, and a fixture that fixes the thread count."""

import functools
import importlib.util
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gpipe_fast
import gpipe_fast.devices
from gpipe_fast.notes import note_idle_stages
from tests.sampling import sample, seed

# The markers of tests that run, by tier; "" stands for neither of them.
TIERS = {"test": {""}, "rest": {"extended"}, "all": {"", "extended"}, "soak": {"", "extended", "soak"}}
LEFT_OUT = pytest.StashKey[Counter[str]]()
# Builds of torch for the CPU alone come without Triton.
HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore = [] if HAS_TRITON else ["bench", "kernels"]


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=TIERS,
        default="test",
        help="test, the default: what `make test` runs; rest: what it leaves out and `make test-all` runs; "
        "all: both; soak: both and the long runs of `make soak`",
    )


def _marker(item: pytest.Item) -> str:
    """'soak', 'extended' or '': what keeps a test out of `make test`."""
    return next((name for name in ("soak", "extended") if item.get_closest_marker(name)), "")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if missing_for_cuda() and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason=f"cuda: {missing_for_cuda()}"))
        elif item.get_closest_marker("sampled"):
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
        return  # a test that the command line names always runs
    left_out = [item for item in items if _marker(item) not in wanted]
    items[:] = [item for item in items if _marker(item) in wanted]
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = Counter(map(_marker, left_out))
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = dict(config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes the counts of a pytest-xdist worker; every worker leaves out the same tests."""
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = config.stash.get(LEFT_OUT, Counter())
    skipped = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())]
    needs_gpu = sum("cuda: " in reason for reason in skipped)
    told = {
        "extended": "tests that `make test-all` runs",
        "": "tests that `make test` runs",
        "soak": "long runs of `make soak`",
    }
    lines = [f"{left_out[name]} {what}" for name, what in told.items() if left_out[name]]
    lines += [f"{needs_gpu} tests that need a GPU ({missing_for_cuda()})"] if needs_gpu else []
    lines += [] if HAS_TRITON else ["tests/kernels and tests/bench, which need Triton"]
    if lines:
        terminalreporter.write_line(
            f"left out: {'; '.join(lines)}. Samples are drawn by GPIPE_FAST_SEED={seed()}"
        )


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
def nothing_noted() -> Iterator[None]:
    """The note on too few micro-batches comes as in a new process, in this test and after it."""
    note_idle_stages.cache_clear()
    yield
    note_idle_stages.cache_clear()


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
def libraries() -> tuple[Path, Path]:
    """A CUDA runtime that is not there, and the operators for its devices."""
    from tests.fake_cuda.build import build

    return build()
