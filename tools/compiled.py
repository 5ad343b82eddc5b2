"""Compiles kernels for GPUs without a GPU: table of registers, shared memory and spills."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import triton
from triton.compiler import CompiledKernel

from gpipe_fast.fuse.cubin import compile_kernel
from gpipe_fast.lower.launch import KernelSource
from tools.variants import Variant, all_variants

CAPABILITIES = (80, 90)
# The newest and the oldest supported version of Triton; the table has the numbers of both.
TRITON_VERSIONS = ("3.8.0", "3.6.0")
TABLE = Path(__file__).parents[1] / "kernels" / "compiled.md"
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# Variants per task of a worker process.
_CHUNK = 26


def compile_variant(variant: Variant, capability: int) -> CompiledKernel:
    """Compiles a variant for GPUs of a compute capability (90 for 9.0)."""
    compiled: CompiledKernel = compile_kernel(kernel_source(variant), capability)
    return compiled


def kernel_source(variant: Variant) -> KernelSource:
    """Returns what the compiler needs of a variant."""
    names = variant.kernel.arg_names
    return KernelSource(
        variant.kernel,
        tuple((name, variant.signature[name]) for name in names if name in variant.signature),
        tuple({**variant.constants, **variant.config.blocks}.items()),
        tuple(variant.aligned),
        variant.config.num_warps,
        variant.config.num_stages,
    )


T = TypeVar("T")
# The numbers of a table row, as texts.
Numbers = tuple[str, ...]
# By a kernel's name and a GPU's compute capability.
Measured = dict[tuple[str, int], Numbers]


def measure(names: Sequence[str]) -> Measured:
    """Compiles variants with the installed Triton for all `CAPABILITIES`: registers, bytes, spilled bytes."""
    found: Measured = {}
    for name, capability in itertools.product(names, CAPABILITIES):
        compiled = compile_variant(all_variants()[name], capability)
        registers, spilled = resource_usage(compiled.asm["cubin"])
        found[name, capability] = (str(registers), str(compiled.metadata.shared), str(spilled))
    return found


def read_table(
    version: str, path: Path = TABLE, row: str = r"\| (\w+ .*?) \| sm_(\d+) \| (.*) \|$"
) -> Measured:
    """Returns the numbers that a table has of one of `TRITON_VERSIONS`.

    Args:
        version: the version.
        path: the file of the table.
        row: the pattern of a row: the name, the capability and the numbers.
    """
    index, found = TRITON_VERSIONS.index(version), {}
    for line in path.read_text().splitlines() if path.exists() else ():
        if match := re.match(row, line):
            cells = [cell.split(" / ") for cell in match[3].split(" | ")]
            numbers = tuple(cell[index % len(cell)] for cell in cells)
            if "?" not in numbers:
                found[match[1], int(match[2])] = numbers
    return found


def cells(measured: Mapping[str, Measured], key: tuple[str, int], columns: int) -> str:
    """Returns the cells of a row: the numbers of each version, once if they are equal, "?" if unknown."""
    by_version = [measured[version].get(key, ("?",) * columns) for version in TRITON_VERSIONS]
    return " | ".join(" / ".join(dict.fromkeys(numbers)) for numbers in zip(*by_version, strict=True))


def of_both_versions(
    read: Callable[[str], Measured],
    measure: Callable[[Sequence[T]], Measured],
    items: Sequence[T],
    chunk: int,
) -> dict[str, Measured]:
    """Returns the numbers of both versions; those of the installed one are measured, in processes.

    Args:
        read: returns what the table has of a version.
        measure: takes some of the items; a function of a module.
        items: what is compiled.
        chunk: how many items a process gets at once.
    """
    if triton.__version__ not in TRITON_VERSIONS:
        sys.exit(f"the table has Triton {' and '.join(TRITON_VERSIONS)}, this is {triton.__version__}")
    chunks = [items[start : start + chunk] for start in range(0, len(items), chunk)]
    found: Measured = {}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for each in pool.map(measure, chunks):
            found |= each
    return {**{version: read(version) for version in TRITON_VERSIONS}, triton.__version__: found}


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Returns the registers of a thread, and the bytes of registers that it spills to memory."""
    usage = cuobjdump(cubin, "-res-usage")
    spilled = re.findall(r"(?:STACK|LOCAL):(\d+)", usage)
    return int(re.findall(r"REG:(\d+)", usage)[-1]), sum(map(int, spilled))


def cuobjdump(cubin: bytes, option: str) -> str:
    """Returns what the program cuobjdump prints of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def table(measured: Mapping[str, Measured]) -> str:
    """Formats the numbers of every version; a variant that a version has not compiled has none."""
    newest, oldest = TRITON_VERSIONS
    lines = [
        "# Kernels as compiled",
        "",
        f"By Triton {newest} and {oldest}, without a GPU. `python -m tools compiled` compiles with the",
        "installed version and keeps the other's numbers. Where they differ, a cell has both, the number of",
        f"{newest} first. Registers and spilled bytes are per thread, shared memory is per program.",
        "",
        "| kernel, dtype, configuration | for | registers | shared bytes | spilled bytes |",
        "|---|---|---|---|---|",
    ]
    for name, capability in itertools.product(all_variants(), CAPABILITIES):
        lines.append(f"| {name} | sm_{capability} | {cells(measured, (name, capability), 3)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the installed version's numbers to kernels/compiled.md and prints the table."""
    text = table(of_both_versions(read_table, measure, list(all_variants()), _CHUNK))
    TABLE.write_text(text)
    print(text)
