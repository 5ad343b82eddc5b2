"""Prints for each stream wait in csrc/ how leaving it out is detected.

`python -m tests.fake_cuda.wait_table [SEEDS]` leaves out each wait in every scenario of drop_waits.py, with
deferred work in the orders of SEEDS seeds. Where all bits stay right, it searches logs for what else orders
the work, which takes much longer; these rows come last.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.fake_cuda.build import build
from tests.fake_cuda.call_sites import lines_of, waits_in_source
from tests.fake_cuda.drop_waits import SCENARIOS
from tests.fake_cuda.happens_before import HappensBefore
from tests.fake_cuda.process import run
from tests.fake_cuda.race_detector import read

SEEDS = 8
MAX_EXPLAINED = 3  # waits per call site that are searched for a redundant order


class Outcome(NamedTuple):
    """The symptom of leaving out a call site's waits in a scenario, and after how many seeds (0: never)."""

    seeds: int
    symptom: str
    scenario: str
    site: int


def outcomes(libraries: tuple[Path, Path], scenario: str, seeds: int) -> Iterator[Outcome]:
    """Yields the outcome for each call site that a scenario reaches."""
    with tempfile.NamedTemporaryFile() as sites:
        words = (scenario, str(seeds))
        for line in run("drop_waits.py", libraries, *words, defer=1, sites=sites.name, limit=900):
            site, number, symptom = line.split("\t")
            yield Outcome(int(number), symptom, scenario, int(site, 16))


def why_redundant(libraries: tuple[Path, Path], scenario: str, sites: set[int]) -> dict[int, str]:
    """Returns by call site what else orders the same work in a scenario; empty if nothing does."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        run("drop_waits.py", libraries, scenario, "0", log=log, sites=Path(folder) / "sites")
        lines = read(log)
    order = HappensBefore(lines)
    found = {}
    for site in sites:
        waits = [
            i for i, line in enumerate(lines) if line.kind == "wait" and line.words[3:] == (f"{site:x}",)
        ]
        if not waits:
            continue
        chosen = waits[:: max(1, len(waits) // MAX_EXPLAINED)][:MAX_EXPLAINED]
        reasons = {order.why_redundant(wait, waits) for wait in chosen}
        found[site] = "" if "" in reasons else "; ".join(sorted(reasons))
    return found


def main(seeds: int = SEEDS) -> None:
    libraries = build()
    lines_of(())  # first, since the compilation is slow and may fail
    found = [outcome for scenario in SCENARIOS for outcome in outcomes(libraries, scenario, seeds)]
    locations = lines_of({outcome.site for outcome in found})
    by_location: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in found:
        by_location[locations[outcome.site]].append(outcome)
    undetected = {
        location: group
        for location, group in by_location.items()
        if not any(outcome.symptom for outcome in group)
    }
    for location in waits_in_source():
        if location not in undetected:
            print(f"{location:36} {describe(by_location.get(location, []), set(), seeds)}", flush=True)
    reasons: defaultdict[str, set[str]] = defaultdict(set)
    for scenario in SCENARIOS:
        sites = {
            o.site: location
            for location, group in undetected.items()
            for o in group
            if o.scenario == scenario
        }
        for site, reason in why_redundant(libraries, scenario, set(sites)).items() if sites else ():
            reasons[sites[site]].add(reason or f"UNEXPLAINED in '{scenario}', although all bits are right")
    for location, group in undetected.items():
        print(f"{location:36} {describe(group, reasons[location], seeds)}")


def describe(group: list[Outcome], reasons: set[str], seeds: int) -> str:
    """Returns the table cell of a wait."""
    detected = sorted((outcome.symptom != "wrong bits", outcome) for outcome in group if outcome.symptom)
    if detected:
        _, best = detected[0]
        return f"{best.symptom} within {best.seeds} of {seeds} seeds ('{best.scenario}')"
    return f"not needed: {'; '.join(sorted(reasons))}" if group else "reached by no scenario"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
