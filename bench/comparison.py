"""Comparisons: candidates that alternate, each checked before it is timed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.measure import report, samples, timing
from bench.peers import describe_difference, gradients_agree, relative_difference

# Functions to be timed by name, and the gradients that all of them must have; None if they have none.
Opened = tuple[Mapping[str, Callable[[], object]], Sequence[Tensor] | None]


@dataclass
class Outcome:
    """What was measured of one candidate.

    Attributes:
        off: relative difference of its gradients (see `relative_difference`); None if it has none.
        times: microseconds per call of each round; empty if its gradients are wrong.
        peak_bytes: peak memory of a call; None if unknown.
        parts_of_peak: as for `ProcessCandidate.parts_of_peak`.
    """

    off: float | None = None
    times: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    parts_of_peak: tuple[int, int] | None = None

    @property
    def median(self) -> float | None:
        """The median time in microseconds."""
        return timing(self.times).median if self.times else None

    def ms(self) -> str:
        """Returns the time in ms as text."""
        return timing(self.times).ms() if self.times else "-"

    def us(self) -> str:
        """Returns the time in µs as text."""
        return str(timing(self.times)) if self.times else "-"

    def over(self, other: Outcome) -> object:
        """Returns the time divided by another one."""
        return self.median / other.median if self.median and other.median else "-"

    def peak(self) -> str:
        """Returns the peak memory in MiB as text."""
        return "-" if self.peak_bytes is None else f"{self.peak_bytes / 2**20:.0f}"


@dataclass(frozen=True)
class Comparison:
    """Candidates that are timed by turns.

    Attributes:
        name: its name.
        names: the names of the candidates; the first is ours, by whose time the others' are divided.
        opened: makes the candidates and what they must equal; the stack closes what they hold.
        rounds: samples of each candidate, after a warm-up round.
        calls: calls per sample.
        pause: seconds before each sample.
        sampled: whether it is in the sample of `make bench`.
    """

    name: str
    names: Sequence[str]
    opened: Callable[[ExitStack], Opened]
    rounds: int = 15
    calls: int = 1
    pause: float = 0.0
    sampled: bool = False

    def measure(self, seconds: float = float("inf")) -> dict[str, Outcome]:
        """Measures the candidates; the rounds end after so many seconds, but not before the fifth."""
        with ExitStack() as stack, one_thread():
            candidates, wanted = self.opened(stack)
            assert list(candidates) == list(self.names), (self.names, list(candidates))
            return compare(candidates, wanted, self.rounds, self.calls, self.pause, seconds)


@dataclass(frozen=True)
class Series:
    """What is measured elsewhere, such as in processes, with the interface of `Comparison`.

    Attributes:
        name: its name.
        names: the names of what is measured.
        measured: returns the outcomes by these names.
        sampled: whether it is in the sample of `make bench`.
    """

    name: str
    names: Sequence[str]
    measured: Callable[[], dict[str, Outcome]]
    sampled: bool = False

    def measure(self, seconds: float = float("inf")) -> dict[str, Outcome]:
        """Returns the outcomes; there is no limit of time."""
        return self.measured()


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits operators of this process to one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compare(
    candidates: Mapping[str, Callable[[], object]],
    wanted: Sequence[Tensor] | None,
    rounds: int,
    calls: int = 1,
    pause: float = 0.0,
    seconds: float = float("inf"),
) -> dict[str, Outcome]:
    """Compares the gradients of two calls, then times the candidates whose gradients are right."""
    found = {name: Outcome() for name in candidates}
    for name, candidate in candidates.items():
        step: Any = candidate
        if wanted is not None:
            found[name].off = 0.0
            for _ in range(2):
                step()
                found[name].off = max(found[name].off or 0.0, relative_difference(step.gradients(), wanted))
        if hasattr(step, "peak_bytes"):
            found[name].peak_bytes = step.peak_bytes()
        if hasattr(step, "parts_of_peak"):
            found[name].parts_of_peak = step.parts_of_peak()
    right = {name: step for name, step in candidates.items() if is_right(name, found[name])}
    for name, times in samples(right, rounds, calls, pause, seconds).items():
        found[name].times = times
    return found


def is_right(name: str, outcome: Outcome) -> bool:
    """Returns whether a candidate's gradients are right; ours must be equal."""
    return outcome.off is None or gradients_agree(name, outcome.off)


def gradients(name: str, outcome: Outcome) -> str:
    """Returns the result of the comparison of gradients as text."""
    return "-" if outcome.off is None else describe_difference(name, outcome.off)


# What follows a candidate's name to tell its settings.
_SETTINGS = re.compile(r", (K = \d+|always|never)\b")
HEADERS = ["candidate", "ms: median [p20, p80]", "time / ours", "peak memory, MiB", "gradients"]


def rows(outcomes: Mapping[str, Outcome], ours: str) -> list[list[object]]:
    """Returns one row per candidate; one whose gradients are wrong gets neither a time nor a ratio."""
    return [
        [name, each.ms(), each.over(outcomes[ours]), each.peak(), gradients(name, each)]
        for name, each in outcomes.items()
    ]


def verdicts(found: Iterable[Mapping[str, Outcome]]) -> list[list[object]]:
    """Returns a row for each other implementation: in how many comparisons it is, its name without settings,
    and the least and the most of its time, and of its peak memory, divided by ours.
    """
    ratios: dict[str, tuple[list[float], list[float]]] = {}
    for outcomes in found:
        (first, ours), *others = outcomes.items()
        if not first.startswith("gpipe_fast"):
            continue
        for name, other in others:
            times, peaks = ratios.setdefault(_SETTINGS.sub("", name), ([], []))
            if ours.median and other.median:
                times.append(other.median / ours.median)
            if ours.peak_bytes and other.peak_bytes:
                peaks.append(other.peak_bytes / ours.peak_bytes)
    return [
        [name, len(times), _range(times), _range(peaks)]
        for name, (times, peaks) in ratios.items()
        if not name.startswith("gpipe_fast")
    ]


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"


def report_comparisons(
    module: Mapping[str, Any], in_us: bool = False, **values: object
) -> list[dict[str, Outcome]]:
    """Measures a module's `COMPARISONS`, writes their table, and returns what was measured.

    Args:
        module: its ``globals()``.
        in_us: whether times are in µs, and there is neither memory nor a gradient.
        values: values that the docstring names.
    """
    table, outcomes = list[list[object]](), list[dict[str, Outcome]]()
    for comparison in module["COMPARISONS"]:
        found = comparison.measure()
        outcomes.append(found)
        every = rows(found, comparison.names[0])
        if in_us:
            every = [[name, found[str(name)].us(), ratio] for name, _, ratio, *_ in every]
        table += [[comparison.name, *row] for row in every]
    headers = ["candidate", "µs: median [p20, p80]", "time / ours"] if in_us else HEADERS
    report(module, ["comparison", *headers], table, (), **values)
    return outcomes
