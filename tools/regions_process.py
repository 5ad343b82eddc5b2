"""Prints the generated kernels of the stages of tools/stages.py; run with the fake runtime preloaded.

`regions_process.py`: prints one JSON object per kernel: where it is used, its name and source, and what else
the compiler needs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from gpipe_fast.fuse.casts import hoist_parameter_casts
from gpipe_fast.fuse.cubin import generated_from, kernel_of
from gpipe_fast.fuse.cubins import sources_of
from gpipe_fast.fuse.fuse import fuse_alike
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE
from gpipe_fast.lower.launch import KernelSource
from gpipe_fast.lower.split import split
from tools.stages import LARGE, PRECISIONS, STAGES, trace_stage


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


def main() -> None:
    for kernel in generated_kernels():
        print(json.dumps(asdict(kernel)), flush=True)


if __name__ == "__main__":
    main()
