"""The demo: a byte-level GPT learns Python's standard library, trained by `GPipe`."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from gpipe_fast import GPipe
from gpipe_fast.demo_model import gpt
from gpipe_fast.demo_text import Text, load, windows
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.partition import cut_evenly

HELD_OUT_WINDOWS = 256
PROMPT = b"def "
TEMPERATURE = 0.8


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, measures on text held out before and after, and shows what the model writes."""
    began = time.perf_counter()
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        text = load(args.text)
        check(args, text)
    except ValueError as error:
        parser.error(str(error))
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    layers = gpt(args.width, args.layers, args.heads, args.length, args.dropout)
    balance = cut_evenly([sum(p.numel() for p in layer.parameters()) for layer in layers], args.stages)
    model = GPipe(layers, balance, chunks=args.chunks, checkpoint=args.checkpoint)

    _describe(args, model, text)
    print(f"first held-out loss: {held_out_loss(model, text.held_out, args):.3f} bits per byte", flush=True)
    losses = train(model, text.training, args)
    if len(losses) < args.steps:
        print(f"interrupted after {len(losses)} of {args.steps} steps")
    print(f"last held-out loss: {held_out_loss(model, text.held_out, args):.3f} bits per byte")
    written = generate(model, PROMPT, args.sample, args.length, args.seed)
    print(f"sample:\n{'-' * 72}\n{written.decode('ascii', 'backslashreplace')}\n{'-' * 72}")
    if args.save:
        torch.save(model.state_dict(), args.save)
        print(f"checkpoint: {args.save}")
    print(f"done in {time.perf_counter() - began:.0f} s")


def train(model: nn.Module, text: Tensor, args: argparse.Namespace) -> list[float]:
    """Trains on random windows until done or interrupted (Ctrl-C).

    Args:
        model: tokens (batch, length) to logits (batch, length, 256).
        text: uint8, of shape (bytes,).
        args: the settings, as parsed.

    Returns:
        The loss of every finished step, in bits per byte.
    """
    optimizer, schedule = _optimizer(model, args)
    generator = torch.Generator().manual_seed(args.seed)
    losses: list[float] = []
    model.train()
    # A terminal redraws the bar in place, a log keeps every update.
    interval = 0.5 if sys.stderr.isatty() else 15.0
    total = args.steps * args.batch * args.length
    with tqdm(total=total, unit=" tokens", unit_scale=True, mininterval=interval) as bar:
        try:
            for _ in range(args.steps):
                starts = torch.randint(len(text) - args.length, (args.batch,), generator=generator)
                tokens, targets = windows(text, starts, args.length)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                losses.append(loss.item() / math.log(2))
                bar.set_postfix_str(f"loss {fmean(losses[-20:]):.3f} bits per byte", refresh=False)
                bar.update(tokens.numel())
        except KeyboardInterrupt:
            bar.write("stopping: one last measurement and a sample; Ctrl-C again to leave at once")
    return losses


def _optimizer(
    model: nn.Module, args: argparse.Namespace
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW that decays matrices only, its rate warmed up linearly, then a cosine down to a twentieth."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98))
    warm_up: int = max(1, min(50, args.steps // 10))

    def factor(step: int) -> float:
        done = max(0, step - warm_up) / max(1, args.steps - warm_up)
        return min(1.0, (step + 1) / warm_up) * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, args: argparse.Namespace) -> float:
    """The mean loss, in bits per byte, over windows spread evenly over ``text``: always the same ones."""
    model.eval()
    starts = torch.linspace(0, len(text) - args.length - 1, HELD_OUT_WINDOWS, dtype=torch.float64).long()
    total = 0.0
    for part in starts.split(args.batch):
        tokens, targets = windows(text, part, args.length)
        logits = model(tokens).flatten(0, 1)
        total += F.cross_entropy(logits, targets.flatten(), reduction="sum").item()
    return float(total / (len(starts) * args.length * math.log(2)))


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, count: int, length: int, seed: int) -> bytes:
    """Lets the model continue ``prompt`` by ``count`` bytes and returns both.

    Every call sees a window of ``length`` tokens, so that the pipeline is lowered once. What fills it up on
    the right changes nothing: attention is causal, and the last written position is the one that is read.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    written = list(prompt)
    for _ in range(count):
        seen = written[-length:]
        tokens = torch.tensor([seen + [0] * (length - len(seen))])
        logits = model(tokens)[0, len(seen) - 1]
        chances = torch.softmax(logits / TEMPERATURE, dim=0)
        written.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(written)


def check(args: argparse.Namespace, text: Text) -> None:
    """Refuses settings that do not fit together, before any work starts.

    Raises:
        ValueError: there are more stages than layers, the heads do not divide the width, the text is too
            short, or the checkpoint cannot be written.
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
                f"the text is too short: its {name} part has {len(part)} bytes, and a window takes "
                f"{args.length + 1}"
            )
    if args.save and args.save.is_dir():
        raise ValueError(f"cannot save to the folder {args.save}; name a file")
    if args.save and not args.save.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {args.save.parent} to save to")


def _describe(args: argparse.Namespace, model: GPipe, text: Text) -> None:
    parameters = sum(p.numel() for p in model.parameters())
    microbatches = len(torch.empty(args.batch).chunk(args.chunks))
    print(f"text: {len(text.training):,} bytes to train on, {len(text.held_out):,} held out")
    print(
        f"model: {parameters:,} parameters in {len(model)} layers, cut into stages of {model.balance} layers"
    )
    print(
        f"step: {args.batch} windows of {args.length} bytes in {microbatches} micro-batches, "
        f"checkpoint={model.checkpoint}, {torch.get_num_threads()} threads"
    )
    if microbatches < args.chunks:
        print(f"note: a mini-batch of {args.batch} makes {microbatches} micro-batches, not {args.chunks}")


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _parser() -> argparse.ArgumentParser:
    """The command line; its defaults take a few minutes on two cores."""
    parser = argparse.ArgumentParser(
        prog="python -m gpipe_fast.demo",
        description="Trains a byte-level GPT on Python's standard library as a pipeline of stages.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=_positive, default=1200, help="mini-batches to train on")
    add("--stages", type=_positive, default=2, help="stages of the pipeline (K)")
    add("--chunks", type=_positive, default=4, help="micro-batches per mini-batch (M)")
    add("--checkpoint", choices=CHECKPOINT_MODES, default="except_last", help="which micro-batches recompute")
    add("--width", type=_positive, default=128, help="of every token's vector")
    add("--layers", type=_positive, default=4, help="Transformer blocks")
    add("--heads", type=_positive, default=4, help="attention heads per block")
    add("--dropout", type=float, default=0.0, help="probability")
    add("--length", type=_positive, default=128, help="bytes per window")
    add("--batch", type=_positive, default=16, help="windows per mini-batch (N)")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--seed", type=int, default=0, help="of the weights, the windows and the sample")
    add("--threads", type=_positive, default=None, help="threads inside an operator; by default PyTorch's")
    add("--text", type=Path, default=None, help="another file or folder to learn")
    add("--sample", type=_positive, default=400, help="bytes to write at the end")
    add("--save", type=Path, default=None, help="write the state_dict here, for a plain nn.Sequential too")
    return parser


if __name__ == "__main__":
    main()
