"""`make results`: writes every table of bench/results that this machine can make, on one commit.

Each table is made in a process of its own: first what is counted, on all cores, then what is timed, one after
another. The rounds of a comparison take at most `ROUND_SECONDS`, which each table says. A table that cannot
be made does not stop the others. Files that were written on a GPU with an older tree get a line that says so.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from tabulate import tabulate

from bench.__main__ import BENCHMARKS, TOOLS
from bench.measure import RESULTS, ROOT, commit, uncommitted

ROUND_SECONDS = 10
NEED_A_GPU = {"cuda"}
# What only a machine with a GPU can write; the rest of the tree may be newer.
GPU_FILES = ("gpu-*.md", "nvidia-*.md")
_OLDER = "**Older than this tree: measured at commit"
# What takes about so many times as long as most tables that are timed, for the estimate of the time left.
WEIGHTS = {"ledger": 5, "frontier": 4, "step": 3, "first-call": 2, "distributed": 2}


def counted() -> dict[str, list[str]]:
    """Returns the arguments of Python that make each table that is counted or computed, the longest first."""
    contract = "tests.contracts.contract_1_same_bits"
    found = {"census-torchvision": ["-m", "tools", "census"]}
    found |= {name: ["-m", f"{contract}.{name}"] for name in ("cuda_operators_table", "census")}
    return found | {name: ["-m", "tools", name] for name in TOOLS if name not in ("census", "ledger")}


def commands() -> dict[str, list[str]]:
    """Returns the arguments of Python that make each table."""
    timed = {name: ["-m", "bench", name] for name in BENCHMARKS if name not in NEED_A_GPU}
    return {**counted(), **timed, "ledger": ["-m", "tools", "ledger"]}


def make(name: str, command: list[str], **variables: str) -> list[str]:
    """Makes a table in a process, and returns its row of the summary."""
    began = time.monotonic()
    code = subprocess.run([sys.executable, *command], cwd=ROOT, env=os.environ | variables).returncode
    return [name, f"{time.monotonic() - began:.0f}", "written" if code == 0 else f"FAILED ({code})"]


def marked(text: str, present: str) -> str:
    """Returns a file of results with a line below its title, if it was measured at another commit.

    Args:
        text: the file.
        present: the commit of the tree.
    """
    title, _, rest = text.partition("\n")
    if rest.startswith(f"\n{_OLDER}"):
        rest = rest.partition("\n")[2].partition("\n")[2]
    measured = re.search(r"; commit (\w+)", rest)
    if measured is None or present.startswith(measured[1]):
        return f"{title}\n{rest}"
    line = f"{_OLDER} {measured[1]}; `make gpu` on a GPU measures again.**"
    return f"{title}\n\n{line}\n{rest}"


def mark_gpu_files() -> None:
    """Marks the files that were written on a GPU with an older tree."""
    for pattern in GPU_FILES:
        for path in sorted(RESULTS.glob(pattern)):
            path.write_text(marked(path.read_text(), commit()))


def main() -> None:
    if changes := uncommitted():
        sys.exit(f"make results: commit these changes first, so that every table has one commit:\n{changes}")
    begin, every = time.monotonic(), commands()
    in_parallel = [name for name in counted() if name in every]
    timed = [name for name in every if name not in in_parallel]
    print(f"results: {len(in_parallel)} tables that are counted", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(lambda name: make(name, every[name]), in_parallel))
    begin_timed, done, total = time.monotonic(), 0, sum(WEIGHTS.get(name, 1) for name in timed)
    for number, name in enumerate(timed, 1):
        spent = time.monotonic() - begin_timed
        left = f", about {spent / done * (total - done) / 60:.0f} min left" if done else ""
        print(f"results: {name} ({number} of {len(timed)}{left})", file=sys.stderr, flush=True)
        rows.append(make(name, every[name], GPIPE_FAST_ROUND_SECONDS=str(ROUND_SECONDS)))
        done += WEIGHTS.get(name, 1)
    mark_gpu_files()
    print(tabulate(rows, headers=["table", "seconds", ""], tablefmt="github"))
    print(f"\n{(time.monotonic() - begin) / 60:.0f} minutes")
    sys.exit(any("FAILED" in row[-1] for row in rows))


if __name__ == "__main__":
    main()
