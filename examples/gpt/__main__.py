"""The demo: trains a byte-level GPT on Python's standard library with `GPipe`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from examples.gpt.checkpoint import load_checkpoint, resume_settings, save_checkpoint
from examples.gpt.model import gpt
from examples.gpt.report import compare, draw_step
from examples.gpt.text import Text, evenly_spaced_starts, load, windows
from examples.gpt.train import Training, cross_entropy, generate, held_out_loss
from gpipe_fast import GPipe, verify
from gpipe_fast.balance.partition import balance_by_cost
from gpipe_fast.gpipe import CHECKPOINT_MODES

FOLDER = Path("build/demo")
PROMPT = b"def "


def main(argv: Sequence[str] | None = None) -> None:
    """Trains the model, reports its held-out loss before and after, prints a sample, and reports timings."""
    began = time.perf_counter()
    args, text, checkpoint = _parse_settings(argv)
    torch.manual_seed(args.seed)

    layers = gpt(args.width, args.layers, args.heads, args.length, args.dropout)
    balance = balance_by_cost(args.stages, [sum(p.numel() for p in layer.parameters()) for layer in layers])
    devices = ["cpu"] * len(balance)
    model = GPipe(layers, balance, devices=devices, chunks=args.chunks, checkpoint=args.checkpoint)
    training = Training(model, args)
    _print_setup(args, model, text)

    tokens, targets = windows(
        text.training, evenly_spaced_starts(text.training, args.batch, args.length), args.length
    )
    print(check_equality(model, tokens, targets, args.chunks))
    if checkpoint is not None:
        training.load_state_dict(checkpoint)
        print(f"resuming after {len(training.losses)} of {args.steps} steps")
    print(f"first held-out loss: {held_out_loss(model, text.held_out, args):.3f} bits per byte", flush=True)
    training.run(text.training)
    save_checkpoint(args.save, training, resume_settings(args, text))
    finished = len(training.losses) == args.steps
    if not finished:
        print(f"interrupted after {len(training.losses)} of {args.steps} steps; continue with --resume")
    print(f"checkpoint: {args.save} (a plain nn.Sequential can load its 'model' entry)", flush=True)

    print(f"last held-out loss: {held_out_loss(model, text.held_out, args):.3f} bits per byte")
    sample_text = generate(model, PROMPT, args.sample, args.length, args.seed)
    print(f"sample:\n{'-' * 72}\n{sample_text.decode('ascii', 'backslashreplace')}\n{'-' * 72}", flush=True)
    if finished:
        print(f"forward, loss and backward of a mini-batch:\n{compare(model, tokens, targets, args)}")
        draw_step(model, tokens, targets, args.picture)
        print(f"timeline of a step: {args.picture}")
    print(f"finished in {time.perf_counter() - began:.0f} s")


def check_equality(model: GPipe, tokens: Tensor, targets: Tensor, chunks: int) -> str:
    """Compares a step over the first two micro-batches with the plain loop; returns the result as text."""
    num_samples = 2 * len(tokens.chunk(chunks)[0])
    report = verify(
        model, tokens[:num_samples], lambda logits: cross_entropy(logits, targets[:num_samples]), chunks=2
    )
    return report.headline if report else str(report)


def check_settings(args: argparse.Namespace, text: Text) -> None:
    """Checks the settings before any work starts.

    Raises:
        ValueError: there are more stages than layers, the heads do not divide the width, the dropout or
            learning rate is out of range, the text is too short, or a file cannot be written.
    """
    if args.stages > args.layers + 2:
        raise ValueError(
            f"cannot cut {args.layers + 2} layers (the embedding, {args.layers} blocks, the head) into "
            f"{args.stages} stages"
        )
    if args.width % args.heads:
        raise ValueError(f"the width must be a multiple of the heads, got {args.width} and {args.heads}")
    if not 0.0 <= args.dropout < 1.0:
        raise ValueError(f"dropout must be at least 0 and below 1, got {args.dropout}")
    if args.lr <= 0.0:
        raise ValueError(f"the learning rate must be positive, got {args.lr}")
    for name, part in zip(("training", "held-out"), text, strict=True):
        if len(part) <= args.length:
            raise ValueError(
                f"the text is too short: its {name} part has {len(part)} bytes, and a window needs "
                f"{args.length + 1}"
            )
    for path in (args.save, args.picture):
        _check_writable(path)


def _check_writable(path: Path) -> None:
    folder = path.absolute().parent
    if path.parent == FOLDER:
        folder.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise ValueError(f"cannot save to the folder {path}; pass a file name")
    if not folder.is_dir():
        raise ValueError(f"there is no folder {path.parent} to save to")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"cannot write into the folder {path.parent}")


def _parse_settings(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Text, dict[str, Any] | None]:
    """Parses and checks the settings, with ``auto`` resolved; also returns the text and the checkpoint."""
    parser = command_line()
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.stages == "auto":
        args.stages = min(max(2, min(_cores(), 4)), args.layers + 2)
    if args.chunks == "auto":
        args.chunks = min(4 * args.stages, args.batch)
    try:
        text = load(args.text)
        check_settings(args, text)
        checkpoint = load_checkpoint(args.save, resume_settings(args, text)) if args.resume else None
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args, text, checkpoint


def _cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _print_setup(args: argparse.Namespace, model: GPipe, text: Text) -> None:
    parameters = sum(p.numel() for p in model.parameters())
    microbatches = len(torch.empty(args.batch).chunk(args.chunks))
    print(f"text: {len(text.training):,} bytes for training, {len(text.held_out):,} bytes held out")
    print(f"model: {parameters:,} parameters in {len(model)} layers; layers per stage: {model.balance}")
    print(
        f"step: {args.batch} windows of {args.length} bytes in {microbatches} micro-batches, "
        f"checkpoint={model.checkpoint}, {torch.get_num_threads()} threads"
    )
    if microbatches < args.chunks:
        print(f"note: a mini-batch of {args.batch} yields {microbatches} micro-batches, not {args.chunks}")


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _positive_or_auto(word: str) -> int | Literal["auto"]:
    return "auto" if word == "auto" else _positive(word)


def command_line() -> argparse.ArgumentParser:
    """Returns the argument parser; a run with its defaults takes a few minutes on two cores."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.gpt",
        description="Trains a byte-level GPT on Python's standard library as a pipeline of stages.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=_positive, default=1200, help="training steps, each on one mini-batch")
    add("--stages", type=_positive_or_auto, default="auto", help="stages (K); auto: one per core, 2 to 4")
    add(
        "--chunks", type=_positive_or_auto, default="auto", help="micro-batches per mini-batch (M); auto: 4 K"
    )
    add("--checkpoint", choices=CHECKPOINT_MODES, default="except_last", help="which micro-batches recompute")
    add("--width", type=_positive, default=128, help="size of a token's vector")
    add("--layers", type=_positive, default=4, help="Transformer blocks")
    add("--heads", type=_positive, default=4, help="attention heads per block")
    add("--dropout", type=float, default=0.0, help="dropout probability")
    add("--length", type=_positive, default=128, help="bytes per window")
    add("--batch", type=_positive, default=16, help="windows per mini-batch (N)")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--seed", type=int, default=0, help="random seed of the weights, the windows and the sample")
    add(
        "--threads",
        type=_positive,
        default=None,
        help="threads of all stages together; by default PyTorch's setting",
    )
    add("--text", type=Path, default=None, help="a file or folder to train on instead")
    add("--sample", type=_positive, default=400, help="bytes to generate at the end")
    add(
        "--save",
        type=Path,
        default=FOLDER / "checkpoint.pt",
        help="checkpoint file, written at the end and on Ctrl-C",
    )
    add("--resume", action="store_true", help="resume from the checkpoint file given by --save")
    add("--picture", type=Path, default=FOLDER / "step.svg", help="file for the timeline of a step")
    return parser


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
