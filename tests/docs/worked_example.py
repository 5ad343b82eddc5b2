"""The worked example in the guide of fused kernels; `python -m tests.docs.worked_example` prints it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from gpipe_fast.fuse.cubin import compile_kernel, generated_from
from gpipe_fast.fuse.cubins import sources_of
from gpipe_fast.fuse.launchers import launches_in
from gpipe_fast.fuse.regions.kernel import fragment_of
from gpipe_fast.lower.launch import KernelLaunch
from tests.docs.markdown import FENCE, ROOT
from tests.unit.fuse.graphs import regions_in
from tests.unit.kernels.compiled import cuobjdump, resource_usage

CAPABILITY = 90
SHAPES = ((2048, 1024), (2048, 1024), (1024,))
GUIDE = (ROOT / "docs" / "guide" / "fused_kernels.md").read_text()
SECTION = GUIDE.partition("\n## A generated kernel\n")[2].partition("\n## ")[0]
# The layer, the kernel, and what of its machine code accesses memory.
LAYER, *SHOWN = (re.sub(r"```\w*\n?", "", block).strip() for block in FENCE.findall(SECTION)[:3])


def launch_of_the_layer() -> KernelLaunch:
    namespace: dict[str, Callable[..., Any]] = {}
    exec(LAYER, {"torch": torch}, namespace)
    (region,) = regions_in(namespace["layer"], *SHAPES, dtypes=[torch.bfloat16] * len(SHAPES))
    (launch,) = launches_in(fragment_of(region))
    return launch


def kernel_text(launch: KernelLaunch) -> str:
    """Returns the source of the kernel after its imports."""
    text = generated_from(launch.kernel.fn)
    assert text is not None
    return text[text.index("@triton.jit") :].strip()


def memory_accesses(launch: KernelLaunch) -> str:
    """Returns the registers of a thread, and the instructions of the cubin that access global memory."""
    source, _ = sources_of(launch)
    cubin = compile_kernel(source, CAPABILITY).asm["cubin"]
    assembly = cuobjdump(cubin, "-sass")
    registers, spilled = resource_usage(cubin)
    found = re.findall(r"(?:@!?\w+ )?(?:LDG|STG)\.[^;]*", assembly)
    return "\n".join([f"{registers} registers, {spilled} bytes spilled", *map(str.strip, found)])


def main() -> None:
    launch = launch_of_the_layer()
    print(LAYER, kernel_text(launch), memory_accesses(launch), sep="\n\n")


if __name__ == "__main__":
    main()
