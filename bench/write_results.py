"""`make results`: writes every table of bench/results that this machine can make, on one commit.

Each table is made in a process of its own. The rounds of a comparison take at most `ROUND_SECONDS`, which
each table says. A table that cannot be made does not stop the others. The figures of README and docs follow.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tabulate import tabulate

from bench import figures
from bench.__main__ import BENCHMARKS, TOOLS
from bench.measure import ROOT, uncommitted

ROUND_SECONDS = 15
# Modules outside of bench and tools that write a table.
OTHERS = (
    "tests.contracts.contract_1_same_bits.census",
    "tests.contracts.contract_1_same_bits.cuda_operators_table",
)
NEED_A_GPU = {"cuda", "kernels"}
# About how many times as long as most tables some take, for the estimate of the time left.
WEIGHTS = {
    "census": 10,
    "ledger": 8,
    "step": 3,
    "frontier": 5,
    "largest": 3,
    "first-call": 3,
    "from-model": 3,
}


def commands() -> dict[str, list[str]]:
    """Returns the arguments of Python that make each table."""
    found = {name: ["-m", "bench", name] for name in BENCHMARKS if name not in NEED_A_GPU}
    found |= {name: ["-m", "tools", name] for name in TOOLS}
    return found | {module.rpartition(".")[2]: ["-m", module] for module in OTHERS}


def weight(name: str) -> int:
    """Returns about how long a table takes, relative to most others."""
    return WEIGHTS.get(name, 1)


def main() -> None:
    if changes := uncommitted():
        sys.exit(f"make results: commit these changes first, so that every table has one commit:\n{changes}")
    environment = {**os.environ, "GPIPE_FAST_ROUND_SECONDS": str(ROUND_SECONDS)}
    rows: list[list[str]] = []
    begin, done, every = time.monotonic(), 0, commands()
    total = sum(map(weight, every))
    for name, command in every.items():
        began = time.monotonic()
        left = f", about {(began - begin) / done * (total - done) / 60:.0f} min left" if done else ""
        print(f"results: {name} ({len(rows) + 1} of {len(every)}{left})", file=sys.stderr, flush=True)
        code = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment).returncode
        rows.append([name, f"{time.monotonic() - began:.0f}", "written" if code == 0 else f"FAILED ({code})"])
        done += weight(name)
    figures.main()
    print(tabulate(rows, headers=["table", "seconds", ""], tablefmt="github"))
    print(f"\n{(time.monotonic() - begin) / 60:.0f} minutes")
    sys.exit(any("FAILED" in str(row[-1]) for row in rows))


if __name__ == "__main__":
    main()
