"""The demo's command line: its options, their defaults, and checks before any work starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from examples.gpt.text import Text
from gpipe_fast.gpipe import CHECKPOINT_MODES

FOLDER = Path("build/demo")
# What --quick and --full change; options that are given take precedence.
QUICK = {"steps": 30, "width": 64, "length": 64, "sample": 100}
FULL = {"steps": 1200}


def command_line() -> argparse.ArgumentParser:
    """Returns the argument parser."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.gpt",
        description="Trains a byte-level GPT on Python's standard library as a pipeline of stages.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    runs = parser.add_mutually_exclusive_group()
    runs.add_argument(
        "--quick", action="store_true", help=f"a small model and few steps: {_described(QUICK)}"
    )
    runs.add_argument(
        "--full", action="store_true", help=f"the whole training, some minutes: {_described(FULL)}"
    )
    add("--steps", type=_positive, default=250, help="training steps, each on one mini-batch")
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
    together, threads = "threads of all stages together, divided evenly", torch.get_num_threads()
    add("--threads", type=_positive, default=threads, help=together)
    add("--text", type=Path, default=argparse.SUPPRESS, help="a file or folder to train on instead")
    add("--sample", type=_positive, default=300, help="bytes to generate at the end")
    add("--save", type=Path, default=FOLDER / "checkpoint.pt", help="checkpoint, also written on Ctrl-C")
    add("--resume", action="store_true", help="resume from the checkpoint file given by --save")
    add("--page", type=Path, default=FOLDER / "step.html", help="page with the timeline of a step")
    return parser


def _described(options: dict[str, int]) -> str:
    return " ".join(f"--{name} {value}" for name, value in options.items())


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _positive_or_auto(word: str) -> int | Literal["auto"]:
    return "auto" if word == "auto" else _positive(word)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the checked options, with presets and ``auto`` resolved; sets the thread count."""
    parser = command_line()
    args = parser.parse_args(argv)
    if args.quick or args.full:
        parser.set_defaults(**(QUICK if args.quick else FULL))
        args = parser.parse_args(argv)
    args.text = getattr(args, "text", None)
    torch.set_num_threads(args.threads)
    if args.stages == "auto":
        args.stages = min(max(2, min(_cores(), 4)), args.layers + 2)
    if args.chunks == "auto":
        args.chunks = min(4 * args.stages, args.batch)
    try:
        check(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check(args: argparse.Namespace) -> None:
    """Checks the options.

    Raises:
        ValueError: there are more stages than layers, the heads do not divide the width, the dropout or
            learning rate is out of range, or a file cannot be written.
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
    if args.page.suffix.lower() != ".html":
        raise ValueError(f"the page is an HTML file: --page must end in .html, got {args.page}")
    for path in (args.save, args.page):
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


def check_text(args: argparse.Namespace, text: Text) -> None:
    """Checks the text against the options.

    Raises:
        ValueError: a part of the text is shorter than a window.
    """
    for name, part in zip(("training", "held-out"), text, strict=True):
        if len(part) <= args.length:
            raise ValueError(
                f"the text is too short: its {name} part has {len(part)} bytes, and a window needs "
                f"{args.length + 1}"
            )
