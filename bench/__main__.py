"""`python -m bench [name ...]`: runs the named benchmarks, or all of them without arguments."""

from __future__ import annotations

import argparse
import importlib
import sys

BENCHMARKS = {
    "balance": "step times under the balance of balance_by_time, compared with every other balance",
    "census": "every torchvision model compared with the plain loop: natively run layers, equal gradients",
    "cuda": "steps on a GPU compared with plain PyTorch, torch.compile and torchgpipe; stage-to-stage copies",
    "cuda-counts": "launches, bytes, casts, events and host calls of a GPU step, counted without a GPU",
    "compiled": "registers, spills and 16-byte accesses of every kernel, compiled without a GPU",
    "distributed": "steps of two processes compared with torch.distributed.pipelining, on slow links too",
    "draws": "keyed random draws compared with PyTorch's",
    "engine": "steps of empty programs compared with bare thread hand-offs",
    "execution": "one stage's programs compared with eager autograd and boxed dispatch",
    "explain": "explanations of what is fused in models of transformers and torchvision; needs no GPU",
    "first-call": "first calls of three models, further sequence lengths, and the start of a process",
    "frontier": "step times against peak memory of GPT blocks, from everything recomputed to nothing",
    "from-model": "models of transformers by GPipe.from_model: what is recorded, times, memory to load",
    "fusion": "bytes and launches of stages with and without fused kernels, counted without a GPU",
    "inference-stream": "inference on many mini-batches: GPipe.stream compared with a call for each",
    "interpreted": "one layer run in Python among lowered layers, compared with all layers in Python",
    "kernels": "every kernel on a GPU compared with eager PyTorch, Inductor, Liger-Kernel and a copy",
    "ledger": "what mechanisms gain, each turned off by turns, and bytes of stages without parts of fusion",
    "largest": "the largest models that fit, with and without GPipe, by predictions on shapes",
    "lengths": "training steps on sequences of varying length",
    "memory": "peak memory of training steps compared with a checkpointed plain loop",
    "overhead": "steps of tiny stages compared with torchgpipe and plain PyTorch",
    "pipeline": "steps of two concurrent stages of GPT blocks compared with their critical path",
    "published": "the tables of GPipe and torchgpipe by the simulator, from counted costs of layers",
    "recompute": "GPT blocks compared with eager checkpointing, each in its own process",
    "regions": "registers and spills of the generated kernels of all stages, compiled without a GPU",
    "replicas": "steps of two replicas: how much of the sum of gradients the drain hides",
    "report": "reports on steps whose times are known, advice on planted problems, and what recording costs",
    "schedules": "bubbles of sleeping stages and times of GPT blocks under each schedule of a step",
    "simulated": "step times predicted from one recorded setting compared with measured ones",
    "signature": "overhead of a call before any stage runs",
    "step": "steps of GPT blocks compared with torch.distributed.pipelining, torchgpipe and plain PyTorch",
    "tracing": "time to trace and lower GPT blocks",
    "training-step": "peak memory and time of whole training steps: the loss outside, or in the last stage",
    "within-memory": "steps within a number of bytes compared with balances by time at equal memory",
    "traffic": "bytes that fused backward kernels of recomputed segments read and write",
}


def main() -> None:
    names = ", ".join(f"{name} ({what})" for name, what in BENCHMARKS.items())
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"benchmarks to run (default: all): {names}")
    wanted = parser.parse_args().name or list(BENCHMARKS)
    unknown = [name for name in wanted if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark: {', '.join(unknown)}; choose from {', '.join(BENCHMARKS)}")
    for name in wanted:
        print(f"bench: {name}: {BENCHMARKS[name]}", file=sys.stderr, flush=True)
        importlib.import_module(f"bench.{name.replace('-', '_')}").main()


if __name__ == "__main__":
    main()
