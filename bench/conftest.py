"""`pytest bench`: measures the comparisons of test files with pytest-benchmark, and prints one table.

pytest-benchmark times one function after another. Here, the candidates of a comparison alternate when the
first of them is due, and each one's durations are then replayed to pytest-benchmark, which keeps them
(`--benchmark-json`, `--benchmark-autosave`) and compares them (`pytest-benchmark compare`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from tabulate import tabulate

# Read when torch is loaded. torchgpipe starts threads in every step; only the environment can limit theirs.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench.comparison import HEADERS, Comparison, Outcome, Series, gradients, is_right, rows, verdicts
from bench.measure import machine

NOTE = """Candidates of a comparison take turns; 'time / ours' divides by the first one. Each stage has one
intra-op thread, and stages run at the same time; in steps of GPT blocks, plain loops have two threads.
Gradients that are 'equal' have the bits of the plain loop with one thread; of others, the largest relative
difference is given. docs/performance.md says what each comparison measures."""

# Seconds of rounds of one comparison at most, in the sample and in full.
SAMPLE_SECONDS, FULL_SECONDS = 15.0, 60.0


class Clock:
    """A timer that shows the durations that it is given, one after another."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def replay(self, durations: Sequence[float], benchmark: BenchmarkFixture) -> None:
        """Makes durations, in seconds, the rounds of a benchmark."""
        left = iter(durations)

        def advance() -> None:
            self.now += next(left)

        benchmark.pedantic(advance, rounds=len(durations))  # type: ignore[no-untyped-call]


CLOCK = Clock()


class Suite:
    """The comparisons of one run: those that are due, and what was measured."""

    def __init__(self, full: bool) -> None:
        self.full = full
        self.due: list[str] = []
        self.found: dict[str, dict[str, Outcome] | BaseException] = {}
        self.begin = time.monotonic()

    def outcomes(self, comparison: Comparison | Series, say: Any) -> dict[str, Outcome]:
        """Returns what was measured, once for all candidates.

        Raises:
            BaseException: the comparison failed, for this candidate or for another one.
        """
        if comparison.name not in self.found:
            done = len(self.found)
            taken = time.monotonic() - self.begin
            left = f", about {taken / done * (len(self.due) - done) / 60:.0f} min left" if done else ""
            say(f"\nbench: {comparison.name} ({done + 1} of {len(self.due)}{left})")
            try:
                found = comparison.measure(FULL_SECONDS if self.full else SAMPLE_SECONDS)
                self.found[comparison.name] = found
            except BaseException as error:
                self.found[comparison.name] = error
        found_or_error = self.found[comparison.name]
        if isinstance(found_or_error, BaseException):
            raise found_or_error
        return found_or_error


SUITE = pytest.StashKey[Suite]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="all comparisons in full, not a sample")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[SUITE] = Suite(config.getoption("--all"))
    config.option.benchmark_quiet = True  # the summary below is printed instead


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes a test of each candidate of the module's `COMPARISONS`."""
    if "candidate" in metafunc.fixturenames:
        every = metafunc.config.stash[SUITE].full
        metafunc.parametrize(
            ("comparison", "candidate"),
            [
                pytest.param(each, name, id=f"{each.name}: {name}")
                for each in metafunc.module.COMPARISONS
                if every or each.sampled
                for name in each.names
            ],
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=CLOCK))


def pytest_collection_finish(session: pytest.Session) -> None:
    params = [item.callspec.params for item in session.items if hasattr(item, "callspec")]
    session.config.stash[SUITE].due = list(dict.fromkeys(each["comparison"].name for each in params))
    session.config.stash[SUITE].begin = time.monotonic()


@pytest.fixture
def measured(
    request: pytest.FixtureRequest,
    benchmark: BenchmarkFixture,
    comparison: Comparison | Series,
    candidate: str,
) -> Outcome:
    """Measures the comparison if it is due, and gives the candidate's durations to pytest-benchmark."""
    plugins = request.config.pluginmanager
    reporter: Any = plugins.get_plugin("terminalreporter")
    capture: Any = plugins.get_plugin("capturemanager")

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():  # else pytest would keep the line
            reporter.write_line(line)

    outcomes = request.config.stash[SUITE].outcomes(comparison, say)
    found = outcomes[candidate]
    benchmark.group = comparison.name
    benchmark.extra_info |= {
        "peak_mib": found.peak_bytes and found.peak_bytes / 2**20,
        "gradients": gradients(candidate, found),
    }
    if found.times:
        CLOCK.replay([microseconds / 1e6 for microseconds in found.times], benchmark)
    else:
        benchmark.skipped = True
    assert is_right(candidate, found), f"gradients: {gradients(candidate, found)}"
    return found


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    table: list[list[object]] = []
    for name, found in config.stash[SUITE].found.items():
        if isinstance(found, BaseException):
            table.append([name, f"FAILED: {type(found).__name__}"])
            continue
        for row in rows(found, next(iter(found))):
            table.append([name, *row])
            name = ""
    if table:
        text = tabulate(table, headers=["comparison", *HEADERS], tablefmt="github", floatfmt=".2f")
        terminalreporter.write_line(f"\n{machine()}\n\n{text}\n\n{NOTE}\n")
    measured = [found for found in config.stash[SUITE].found.values() if not isinstance(found, BaseException)]
    if others := verdicts(measured):
        headers = ["beside", "comparisons", "its time / ours", "its peak memory / ours"]
        terminalreporter.write_line(tabulate(others, headers=headers, tablefmt="github"))
