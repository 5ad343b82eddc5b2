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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.measure import RESULTS, machine
from gpipe_fast.fuse.casts import hoist_parameter_casts
from gpipe_fast.fuse.cubin import compile_kernel, generated_from, kernel_of
from gpipe_fast.fuse.cubins import sources_of
from gpipe_fast.fuse.fuse import fuse_alike
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE
from gpipe_fast.lower.launch import KernelSource
from gpipe_fast.lower.split import split
from tools import compiled
from tools.compiled import CAPABILITIES, TRITON_VERSIONS, Measured, cells, of_both_versions, resource_usage
from tools.stages import LARGE, PRECISIONS, STAGES, trace_stage

TABLE = RESULTS / "regions.md"
# Kernels per task of a worker process.
_CHUNK = 8
_MAX_NAMES = 4


@dataclass(frozen=True)
class Generated:
    """A generated kernel.

    Attributes:
        name: its name.
        text: its source.
        used_in: the stages, precisions and graphs that launch it.
        others: the other fields of `KernelSource`.
    """

    name: str
    text: str
    used_in: tuple[str, ...]
    others: dict[str, object]

    def source(self) -> KernelSource:
        """Returns what the compiler needs."""
        pairs = {k: tuple(map(tuple, self.others[k])) for k in ("signature", "constants")}  # type: ignore[call-overload]
        kernel = kernel_of(self.name, self.text)
        return KernelSource(kernel, **{**self.others, **pairs})  # type: ignore[arg-type]


def generated_kernels() -> list[Generated]:
    """Returns the generated kernels of all stages in all precisions, each once."""
    found: dict[str, Generated] = {}
    for stage_name, stage in STAGES.items():
        for mode, precision in PRECISIONS.items():
            parts = split(hoist_parameter_casts(trace_stage(stage, precision, LARGE)), FULL_RECOMPUTE)
            assert parts.backward is not None
            for fused in fuse_alike(parts.forward, parts.backward, lambda _: None, lambda _: False):
                for launch in fused.launches():
                    text = generated_from(launch.kernel.fn)
                    if text is None:
                        continue
                    fields = vars(sources_of(launch)[0])
                    others = {k: v for k, v in fields.items() if k != "kernel"}
                    key = repr((launch.name, others))
                    used = f"{stage_name}, {mode}"
                    before = found[key].used_in if key in found else ()
                    used_in = before if used in before else (*before, used)
                    found[key] = Generated(launch.kernel.fn.__name__, text, used_in, others)
    return list(found.values())


def kernel_fields() -> list[dict[str, object]]:
    """Returns the fields of the generated kernels."""
    return [asdict(kernel) for kernel in generated_kernels()]


def kernels(runtime: Path) -> list[Generated]:
    """Returns the generated kernels of all stages, found in a process with the fake runtime."""
    from tools import fake_cuda

    return [Generated(**each) for each in fake_cuda.call(runtime, "tools.regions:kernel_fields")]


def read_kernels(text: str) -> list[Generated]:
    """Returns the kernels in lines of JSON."""
    return [Generated(**json.loads(line)) for line in text.splitlines()]


def measure(chosen: Sequence[Generated]) -> Measured:
    """Returns registers and spilled bytes of kernels, compiled with the installed Triton."""
    return {
        (kernel.name, capability): tuple(
            map(str, resource_usage(compile_kernel(kernel.source(), capability).asm["cubin"]))
        )
        for kernel, capability in itertools.product(chosen, CAPABILITIES)
    }


def read_table(version: str) -> Measured:
    """Returns the numbers in the table of one of the versions of Triton."""
    return compiled.read_table(version, TABLE, r"\| `(\w+)` \| .* \| sm_(\d+) \| (.*) \|$")


def table(chosen: Sequence[Generated], measured: Mapping[str, Measured]) -> str:
    """Formats the numbers of both versions."""
    newest, oldest = TRITON_VERSIONS
    lines = [
        "# Generated kernels as compiled",
        "",
        f"{machine()}.",
        f"The kernels of regions in the stages of `python -m tools fusion`, by Triton {newest} and {oldest},",
        "without a GPU (`python -m tools regions`). Where they differ, a cell has both, the number of",
        f"{newest} first. Registers and spilled bytes are per thread.",
        "",
        "| kernel | used in | for | registers | spilled bytes |",
        "|---|---|---|---|---|",
    ]
    for kernel, capability in itertools.product(chosen, CAPABILITIES):
        used = kernel.used_in
        more = f" and {len(used) - _MAX_NAMES} more" if len(used) > _MAX_NAMES else ""
        numbers = cells(measured, (kernel.name, capability), 2)
        where = "; ".join(used[:_MAX_NAMES]) + more
        lines.append(f"| `{kernel.name}` | {where} | sm_{capability} | {numbers} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools regions", description=__doc__)
    parser.add_argument("--kernels", type=Path, metavar="FILE", help="compile the kernels in FILE")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the kernels to FILE, too")
    options = parser.parse_args(arguments)
    if options.kernels is not None:
        chosen = read_kernels(options.kernels.read_text())
    else:
        from tools import fake_cuda

        if (libraries := fake_cuda.libraries("regions")) is None:
            return
        chosen = kernels(libraries[0])
    if options.write is not None:
        options.write.write_text("".join(json.dumps(vars(kernel)) + "\n" for kernel in chosen))
    text = table(chosen, of_both_versions(read_table, measure, chosen, _CHUNK))
    TABLE.write_text(text)
    print(text)
