"""Compiles kernels for GPUs without a GPU: table of registers, shared memory, spills, 16-byte accesses."""

from __future__ import annotations

import bisect
import itertools
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
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
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# nvdisasm's names of the architectures that Triton compiles for.
_ARCHITECTURES = {80: "SM80", 90: "SM90a"}
_INSTRUCTION_BYTES = 16
# Variants per task of a worker process, which compiles them and disassembles them together.
_CHUNK = 26


@dataclass(frozen=True)
class Compiled:
    """The resource usage of a compiled kernel, read from its cubin.

    Attributes:
        registers: registers per thread.
        shared_bytes: shared memory per program.
        spilled_bytes: bytes of registers that each thread spills to memory.
        accesses: instructions that read or write global memory.
        wide_accesses: the accesses with 16 bytes per thread.
    """

    registers: int
    shared_bytes: int
    spilled_bytes: int
    accesses: int
    wide_accesses: int


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
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
# The numbers of a table row, as texts.
Numbers = tuple[str, ...]
# By a kernel's name and a GPU's compute capability.
Measured = dict[tuple[str, int], Numbers]


def measure(names: Iterable[str]) -> Measured:
    """Compiles variants with the installed Triton for all `CAPABILITIES`."""
    names = list(names)
    return {
        (name, capability): _numbers(found)
        for capability in CAPABILITIES
        for name, found in _measure(names, capability).items()
    }


def _numbers(c: Compiled) -> Numbers:
    counts = (c.registers, c.shared_bytes, c.spilled_bytes)
    return (*map(str, counts), f"{c.wide_accesses} of {c.accesses}")


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
    """Returns the numbers of both versions: those of the installed one are measured, in processes."""
    if triton.__version__ not in TRITON_VERSIONS:
        sys.exit(f"the table has Triton {' and '.join(TRITON_VERSIONS)}, this is {triton.__version__}")
    return {**{v: read(v) for v in TRITON_VERSIONS}, triton.__version__: in_processes(measure, items, chunk)}


def _measure(names: Sequence[str], capability: int) -> dict[str, Compiled]:
    made = [compile_variant(all_variants()[name], capability) for name in names]
    cubins = [kernel.asm["cubin"] for kernel in made]
    found = {}
    for name, kernel, cubin, assembly in zip(
        names, made, cubins, disassemble(cubins, capability), strict=True
    ):
        registers, spilled = resource_usage(cubin)
        accesses = re.findall(r"\b(?:LDG|STG|LDGSTS)\.[\w.]*", assembly)
        found[name] = Compiled(
            registers,
            kernel.metadata.shared,
            spilled,
            len(accesses),
            sum(".128" in access for access in accesses),
        )
    return found


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Returns the registers of a thread, and the bytes of registers that it spills to memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output("cuobjdump", "-res-usage", file.name)
    spilled = re.findall(r"(?:STACK|LOCAL):(\d+)", usage)
    return int(re.findall(r"REG:(\d+)", usage)[-1]), sum(map(int, spilled))


def disassemble(cubins: Sequence[bytes], capability: int) -> list[str]:
    """Returns the instructions of each cubin. Runs nvdisasm once for all: it takes half a second to start."""
    codes = [_code(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        listing = _output("nvdisasm", "--binary", _ARCHITECTURES[capability], file.name)
    ends = list(itertools.accumulate(map(len, codes)))
    lines: list[list[str]] = [[] for _ in codes]
    for line in listing.splitlines():
        if address := re.match(r"\s*/\*([0-9a-f]{4,})\*/", line):
            lines[bisect.bisect(ends, int(address[1], 16))].append(line)
    assert all(len(own) == len(code) // _INSTRUCTION_BYTES for own, code in zip(lines, codes, strict=True))
    return ["\n".join(own) for own in lines]


def _code(cubin: bytes) -> bytes:
    """Returns the .text section of the only kernel in a cubin (a 64-bit ELF file)."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    # A section header has name, type, flags, address, offset and length.
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + index * size) for index in range(count)]
    names = sections[names_index][4]
    found = [s for s in sections if cubin.startswith(b".text.", names + s[0])]
    assert len(found) == 1, f"a cubin has {len(found)} kernels, not one"
    *_, offset, length = found[0]
    return cubin[offset : offset + length]


def _output(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def in_processes(measure: Callable[[Sequence[T]], dict[K, V]], items: Sequence[T], chunk: int) -> dict[K, V]:
    """Returns what a function measures of items, in one process per processor.

    Args:
        measure: takes some of the items; a function of a module.
        items: the items.
        chunk: how many items a process gets at once.
    """
    chunks = [items[start : start + chunk] for start in range(0, len(items), chunk)]
    found: dict[K, V] = {}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for each in pool.map(measure, chunks):
            found |= each
    return found


def table(measured: Mapping[str, Measured]) -> str:
    """Formats the numbers of every version; a variant that a version has not compiled has none."""
    newest, oldest = TRITON_VERSIONS
    lines = [
        "# Kernels as compiled",
        "",
        f"By Triton {newest} and {oldest}, without a GPU. `python -m tools compiled` compiles with the",
        "installed version and keeps the other's numbers. Where they differ, a cell has both, the number of",
        f"{newest} first. Registers and spilled bytes are per thread, shared memory is per program. The last",
        "column counts instructions that access global memory: those with 16 bytes per thread, of all.",
        "",
        "| kernel, dtype, configuration | for | registers | shared bytes | spilled bytes "
        "| 16-byte accesses |",
        "|---|---|---|---|---|---|",
    ]
    for name, capability in itertools.product(all_variants(), CAPABILITIES):
        lines.append(f"| {name} | sm_{capability} | {cells(measured, (name, capability), 4)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the installed version's numbers to kernels/compiled.md and prints the table."""
    text = table(of_both_versions(read_table, measure, list(all_variants()), _CHUNK))
    TABLE.write_text(text)
    print(text)
