"""Compiles the generated kernels of all stages without a GPU: table of registers and spilled bytes.

`python -m tools regions` traces the stages of `tools/stages.py` on the fake CUDA runtime of
tests/fake_cuda, and compiles their generated kernels with the installed Triton; the table keeps the numbers
of the other version. Where the stages cannot be traced as by the newest PyTorch, `--kernels FILE` compiles
the kernels that `--write FILE` has written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import triton

from gpipe_fast.fuse.cubin import compile_kernel
from tools.compiled import CAPABILITIES, TRITON_VERSIONS, in_processes, resource_usage
from tools.regions_process import Generated

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "bench" / "results" / "regions.md"
SECONDS = 600
# Kernels per task of a worker process.
_CHUNK = 8
_MAX_NAMES = 4

# Registers and spilled bytes of a thread, by the kernel's name and the GPU's capability.
Measured = dict[tuple[str, int], tuple[int, int]]


def kernels(runtime: Path) -> list[Generated]:
    """Returns the generated kernels of all stages.

    Args:
        runtime: the library of the fake runtime.

    Raises:
        RuntimeError: the process that traces the stages failed.
    """
    return read_kernels(_run("regions_process", runtime))


def _run(module: str, runtime: Path, *words: str) -> str:
    """Runs a module of bench/ on the fake runtime, and returns what it prints."""
    variables = {"LD_PRELOAD": str(runtime), "PYTHONPATH": str(ROOT)}
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | variables
    command = [sys.executable, "-W", "ignore", "-m", f"tools.{module}", *words]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise RuntimeError(f"{module} failed: {done.stderr[-3000:]}")
    return done.stdout


def read_kernels(text: str) -> list[Generated]:
    """Returns the kernels in lines of JSON."""
    return [Generated(**json.loads(line)) for line in text.splitlines()]


def measure(chosen: Sequence[Generated]) -> Measured:
    """Compiles kernels with the installed Triton for all capabilities."""
    return {
        (kernel.name, capability): resource_usage(compile_kernel(kernel.source(), capability).asm["cubin"])
        for kernel, capability in itertools.product(chosen, CAPABILITIES)
    }


def read_table(version: str) -> Measured:
    """Returns the numbers in the table of one of the versions of Triton."""
    index, found = TRITON_VERSIONS.index(version), {}
    for line in TABLE.read_text().splitlines() if TABLE.exists() else ():
        if match := re.match(r"\| `(\w+)` \| .* \| sm_(\d+) \| (.*) \| (.*) \|$", line):
            pair = [cell.split(" / ") for cell in match.groups()[2:]]
            numbers = [cell[index % len(cell)] for cell in pair]
            if "?" not in numbers:
                found[match[1], int(match[2])] = int(numbers[0]), int(numbers[1])
    return found


def table(chosen: Sequence[Generated], measured: Mapping[str, Measured]) -> str:
    """Formats the numbers of both versions."""
    newest, oldest = TRITON_VERSIONS
    lines = [
        "# Generated kernels as compiled",
        "",
        f"The kernels of regions in the stages of `python -m tools fusion`, by Triton {newest} and {oldest},",
        "without a GPU (`python -m tools regions`). Where they differ, a cell has both, the number of",
        f"{newest} first. Registers and spilled bytes are per thread.",
        "",
        "| kernel | used in | for | registers | spilled bytes |",
        "|---|---|---|---|---|",
    ]
    for kernel, capability in itertools.product(chosen, CAPABILITIES):
        found = [measured[v].get((kernel.name, capability)) for v in TRITON_VERSIONS]
        texts = [("?", "?") if pair is None else tuple(map(str, pair)) for pair in found]
        cells = (" / ".join(dict.fromkeys(numbers)) for numbers in zip(*texts, strict=True))
        used = kernel.used_in
        more = f" and {len(used) - _MAX_NAMES} more" if len(used) > _MAX_NAMES else ""
        where = "; ".join(used[:_MAX_NAMES]) + more
        lines.append(f"| `{kernel.name}` | {where} | sm_{capability} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.regions", description=__doc__)
    parser.add_argument("--kernels", type=Path, metavar="FILE", help="compile the kernels in FILE")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the kernels to FILE, too")
    parser.add_argument(
        "--seconds", type=int, metavar="BLOCKS", help="time the compilation of a stage of GPT blocks instead"
    )
    options = parser.parse_args(arguments)
    if triton.__version__ not in TRITON_VERSIONS:
        sys.exit(f"the table has Triton {' and '.join(TRITON_VERSIONS)}, this is {triton.__version__}")
    if options.kernels is not None:
        chosen = read_kernels(options.kernels.read_text())
    else:
        from tests.fake_cuda.build import build, can_build

        if not can_build():
            print("regions: skipped, needs an extension built with CUDA and the toolkit's headers")
            return
        if options.seconds is not None:
            print(_run("regions_compile", build()[0], str(options.seconds)), end="")
            return
        chosen = kernels(build()[0])
    if options.write is not None:
        options.write.write_text("".join(json.dumps(vars(kernel)) + "\n" for kernel in chosen))
    others = {version: read_table(version) for version in TRITON_VERSIONS}
    text = table(chosen, {**others, triton.__version__: in_processes(measure, chosen, _CHUNK)})
    TABLE.write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
