"""What kernels become for GPUs, without one: registers, shared memory, spills, 16-byte accesses."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gpipe_fast.kernels.launch import Variant
from gpipe_fast.kernels.variants import all_variants

CAPABILITIES = (80, 90)
TABLE = Path(__file__).parents[1] / "kernels" / "compiled.md"
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    """What a cubin says of itself.

    Attributes:
        registers: of each thread.
        shared_bytes: of each program.
        spilled_bytes: of each thread's registers, that lie in memory.
        accesses: instructions that read or write global memory.
        wide_accesses: of these, 16 bytes of each thread at once.
    """

    registers: int
    shared_bytes: int
    spilled_bytes: int
    accesses: int
    wide_accesses: int


def compile_variant(variant: Variant, capability: int) -> Compiled:
    """Compiles a kernel for GPUs of a compute capability, 90 for 9.0."""
    constants = {**variant.constants, **variant.config.blocks}
    # In the order of the kernel's own arguments, by which attributes are found.
    names = variant.kernel.arg_names
    signature = {n: variant.signature.get(n, "constexpr") for n in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned}
    source = ASTSource(variant.kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=variant.config.options())
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage, assembly = (_cuobjdump(option, file.name) for option in ("-res-usage", "-sass"))
    accesses = re.findall(r"\b(?:LDG|STG|LDGSTS)\.[\w.]*", assembly)
    return Compiled(
        int(re.findall(r"REG:(\d+)", usage)[-1]),
        made.metadata.shared,
        sum(int(found) for found in re.findall(r"(?:STACK|LOCAL):(\d+)", usage)),
        len(accesses),
        sum(".128" in access for access in accesses),
    )


def _cuobjdump(option: str, path: str) -> str:
    done = subprocess.run([_TOOLS / "cuobjdump", option, path], capture_output=True, text=True, check=True)
    return done.stdout


def rows(names: Iterable[str]) -> list[str]:
    """A table's rows, for some variants; every processor compiles its share."""
    tasks = [(name, capability) for name in names for capability in CAPABILITIES]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return list(pool.map(_row, tasks, chunksize=4))


def _row(task: tuple[str, int]) -> str:
    name, capability = task
    c = compile_variant(all_variants()[name], capability)
    return (
        f"| {name} | sm_{capability} | {c.registers} | {c.shared_bytes} | {c.spilled_bytes} "
        f"| {c.wide_accesses} of {c.accesses} |"
    )


def table() -> str:
    """Of all variants."""
    head = (
        "# Kernels as compiled\n\n"
        f"By Triton {triton.__version__}, without a GPU: `make bench ARGS=compiled`. Registers and spilled "
        "bytes are of a\nthread, shared memory is of a program. The last column counts "
        "instructions that access global memory: those of 16 bytes\na thread, and all.\n\n"
        "| kernel, dtype, configuration | for | registers | shared bytes | spilled bytes "
        "| 16-byte accesses |\n|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(rows(all_variants())) + "\n"


def main() -> None:
    """Writes the table."""
    text = table()
    TABLE.write_text(text)
    print(text)
