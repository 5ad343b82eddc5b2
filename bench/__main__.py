"""`python -m bench [name ...]`: runs the benchmarks, all by default."""

from __future__ import annotations

import argparse
import importlib

BENCHMARKS = {
    "balance": "steps under the balance found by time against those under every other balance",
    "census": "every model of torchvision against the plain loop: native layers, equal gradients",
    "cuda": "steps on a GPU against plain PyTorch, torch.compile and torchgpipe; copies between stages",
    "cuda-counts": "launches, bytes, casts, events and host calls of a step on GPUs, counted without one",
    "compiled": "registers, spills and 16-byte accesses of every kernel, compiled without a GPU",
    "draws": "keyed random draws against PyTorch's own",
    "engine": "steps of empty programs against bare hand-overs between threads",
    "execution": "one stage's programs against eager autograd and boxed dispatch",
    "interpreted": "one layer in Python among lowered ones, against all in Python",
    "kernels": "every kernel on a GPU against eager PyTorch, Inductor, Liger-Kernel and a copy",
    "lengths": "sequences whose length changes from step to step",
    "overhead": "steps of tiny stages against torchgpipe and plain PyTorch",
    "pipeline": "two stages of GPT blocks at once against their critical path",
    "recompute": "GPT blocks against eager checkpointing, in processes of their own",
    "signature": "what a call costs before any stage runs",
    "step": "steps of GPT blocks against torch.distributed.pipelining, torchgpipe and plain PyTorch",
    "tracing": "seconds to trace and lower GPT blocks",
    "traffic": "bytes that fused backwards of recomputed segments read and write, counted",
}


def main() -> None:
    names = ", ".join(f"{name} ({what})" for name, what in BENCHMARKS.items())
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"which to run; by default all: {names}")
    wanted = parser.parse_args().name or list(BENCHMARKS)
    unknown = [name for name in wanted if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    for name in wanted:
        importlib.import_module(f"bench.{name.replace('-', '_')}").main()


if __name__ == "__main__":
    main()
