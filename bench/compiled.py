"""Compiles kernels for GPUs without a GPU: table of registers, shared memory, spills, 16-byte accesses."""

from __future__ import annotations

import bisect
import itertools
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from gpipe_fast.kernels.launch import Variant
from gpipe_fast.kernels.variants import all_variants

CAPABILITIES = (80, 90)
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
    constants = {**variant.constants, **variant.config.blocks}
    # Attributes refer to arguments by their index in the kernel's signature.
    names = variant.kernel.arg_names
    signature = {n: variant.signature.get(n, "constexpr") for n in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned}
    source = ASTSource(variant.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=variant.config.options())


def rows(names: Iterable[str]) -> list[str]:
    """Returns the table rows of these variants."""
    names = list(names)
    found = {capability: _measure(names, capability) for capability in CAPABILITIES}
    return [_row(name, capability, found[capability][name]) for name in names for capability in CAPABILITIES]


def _row(name: str, capability: int, c: Compiled) -> str:
    return (
        f"| {name} | sm_{capability} | {c.registers} | {c.shared_bytes} | {c.spilled_bytes} "
        f"| {c.wide_accesses} of {c.accesses} |"
    )


def _measure(names: Sequence[str], capability: int) -> dict[str, Compiled]:
    made = [compile_variant(all_variants()[name], capability) for name in names]
    cubins = [kernel.asm["cubin"] for kernel in made]
    found = {}
    for name, kernel, cubin, assembly in zip(
        names, made, cubins, _disassemble(cubins, capability), strict=True
    ):
        usage = _resource_usage(cubin)
        accesses = re.findall(r"\b(?:LDG|STG|LDGSTS)\.[\w.]*", assembly)
        found[name] = Compiled(
            int(re.findall(r"REG:(\d+)", usage)[-1]),
            kernel.metadata.shared,
            sum(int(spilled) for spilled in re.findall(r"(?:STACK|LOCAL):(\d+)", usage)),
            len(accesses),
            sum(".128" in access for access in accesses),
        )
    return found


def _resource_usage(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _output("cuobjdump", "-res-usage", file.name)


def _disassemble(cubins: Sequence[bytes], capability: int) -> list[str]:
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


def table() -> str:
    """Returns the table of all variants. Compiles in one process per processor."""
    head = (
        "# Kernels as compiled\n\n"
        f"By Triton {triton.__version__}, without a GPU: `make bench ARGS=compiled`. Registers and spilled "
        "bytes are per\nthread, shared memory is per program. The last column counts "
        "instructions that access global memory: those with\n16 bytes per thread, of all.\n\n"
        "| kernel, dtype, configuration | for | registers | shared bytes | spilled bytes "
        "| 16-byte accesses |\n|---|---|---|---|---|---|\n"
    )
    names = list(all_variants())
    chunks = [names[start : start + _CHUNK] for start in range(0, len(names), _CHUNK)]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        found = itertools.chain.from_iterable(pool.map(rows, chunks))
        return head + "\n".join(found) + "\n"


def main() -> None:
    """Writes the table to kernels/compiled.md and prints it."""
    text = table()
    TABLE.write_text(text)
    print(text)
