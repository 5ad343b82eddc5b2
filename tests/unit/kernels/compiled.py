"""Compiles kernels for GPUs without a GPU, and reads the registers that their machine code needs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

from gpipe_fast.fuse.casts import hoist_parameter_casts
from gpipe_fast.fuse.cubin import compile_kernel, generated_from
from gpipe_fast.fuse.cubins import sources_of
from gpipe_fast.fuse.fuse import fuse_alike
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE
from gpipe_fast.lower.launch import KernelSource
from gpipe_fast.lower.split import split
from tools.stages import LARGE, PRECISIONS, STAGES, trace_stage
from tools.variants import Variant

CAPABILITIES = (80, 90)
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


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


def spilling(source: KernelSource) -> list[int]:
    """Returns the compute capabilities for which a kernel spills registers to memory."""
    cubins = {each: compile_kernel(source, each).asm["cubin"] for each in CAPABILITIES}
    return [capability for capability, cubin in cubins.items() if resource_usage(cubin)[1]]


def spilling_kernels_of(stage: str, precision: str) -> tuple[int, list[str]]:
    """Returns how many kernels are generated for a stage, and those that spill; on the fake CUDA runtime."""
    parts = split(
        hoist_parameter_casts(trace_stage(STAGES[stage], PRECISIONS[precision], LARGE)), FULL_RECOMPUTE
    )
    assert parts.backward is not None
    graphs = fuse_alike(parts.forward, parts.backward, lambda _: None, lambda _: False)
    launches = {launch.specialization: launch for graph in graphs for launch in graph.launches()}
    sources = [sources_of(each)[0] for each in launches.values() if generated_from(each.kernel.fn)]
    return len(sources), [source.kernel.fn.__name__ for source in sources if spilling(source)]


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
