"""Times the compilation of the kernels of GPT blocks; run with the fake runtime preloaded.

`regions_compile.py BLOCKS`: prints, as JSON, seconds: to trace a stage of so many blocks, to find what is
fused, and to do that and compile its kernels, without a cache and with one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from bench.models import gpt
from gpipe_fast.fuse import cubins
from gpipe_fast.fuse.casts import hoist_parameter_casts
from gpipe_fast.fuse.cubins import KernelLoader
from gpipe_fast.fuse.fuse import Fusion, fuse_alike
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE
from gpipe_fast.lower.split import split
from tools.stages import DEVICE, LARGE, PRECISIONS, Stage, trace_stage


def seconds(function: Callable[[], object]) -> float:
    """Returns how long a call takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


@contextmanager
def empty_cache() -> Iterator[None]:
    """Makes an empty folder the cache of cubins."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPIPE_FAST_CACHE"] = folder
        yield


def times(num_blocks: int, precision: str) -> dict[str, object]:
    """Returns the seconds of each part, and the number of kernels."""
    stage = Stage(
        lambda size: list(gpt.blocks(num_blocks, size.width, size.heads)),
        lambda size, dtype: [
            torch.empty(size.batch, size.length, size.width, dtype=dtype, requires_grad=True)
        ],
    )
    begin = time.perf_counter()
    parts = split(hoist_parameter_casts(trace_stage(stage, PRECISIONS[precision], LARGE)), FULL_RECOMPUTE)
    traced = time.perf_counter() - begin
    forward, backward = parts.forward, parts.backward
    assert backward is not None
    found = fuse_alike(forward, backward, lambda _: None, lambda _: False)
    kernels = {launch.specialization for each in found for launch in each.launches()}
    fusing = seconds(lambda: fuse_alike(forward, backward, lambda _: None, lambda _: False))
    fusion = Fusion(KernelLoader(DEVICE))
    with empty_cache():
        cubins.forget()
        cold = seconds(lambda: fusion.fuse(forward, backward))
        cubins.forget()
        cached = seconds(lambda: fusion.fuse(forward, backward))
    return {"kernels": len(kernels), "trace": traced, "fuse": fusing, "cold": cold, "cached": cached}


def main() -> None:
    for precision in ("bf16", "autocast"):
        print(json.dumps({"precision": precision, **times(int(sys.argv[1]), precision)}), flush=True)


if __name__ == "__main__":
    main()
