"""Prints what is fused in the stages of tools/stages.py; run with the fake runtime preloaded.

`fused_nodes.py OPERATORS [STAGE...]`: prints, for each stage (by default all), precision and graph, the nodes
whose values kernels compute.
"""

from __future__ import annotations

import re
import sys

from gpipe_fast.fuse.casts import hoist_parameter_casts
from gpipe_fast.fuse.fuse import Replaced, fuse_alike
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE
from gpipe_fast.lower.split import split
from tools.stages import PRECISIONS, SMALL, STAGES, trace_stage


def line(replaced: Replaced) -> str:
    """Describes one replacement."""
    kernels = [re.sub(r"_[0-9a-f]{8}$", "", name) for name in replaced.kernels]  # without the source's hash
    return f"  {replaced.name}: {', '.join(replaced.nodes)} <- {', '.join(kernels) or 'no kernel'}"


def main() -> None:
    for name in sys.argv[2:] or STAGES:
        for mode, precision in PRECISIONS.items():
            joint = hoist_parameter_casts(trace_stage(STAGES[name], precision, SMALL))
            parts = split(joint, FULL_RECOMPUTE)
            assert parts.backward is not None
            for fused in fuse_alike(parts.forward, parts.backward, lambda _: None, lambda _: False):
                print(f"{name}, {mode}, {fused.graph.name}")
                for replaced in fused.replaced:
                    print(line(replaced))


if __name__ == "__main__":
    main()
