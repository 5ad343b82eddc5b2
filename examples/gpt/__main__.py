"""The demo: a byte-level GPT, cut into stages by `GPipe`, learns Python's standard library.

This file is the program to read: the model, the pipeline, the training loop, the checkpoint and a sample.
Beside it, options.py reads the command line, text.py reads the text, and report.py reports on a step.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from threading import Event
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt.options import check_text, command_line, parse
from examples.gpt.report import compare, compare_bits, draw_step, time_first_steps
from examples.gpt.text import Text, evenly_spaced_starts, load, windows
from gpipe_fast import GPipe
from gpipe_fast.balance import balance_by_cost

VOCABULARY = 256  # a token is a byte
HELD_OUT_WINDOWS = 256
PROMPT = b"def "
TEMPERATURE = 0.8
# The settings that losses depend on, besides the text. The stages and the checkpoint mode change no bit.
RESUME_SETTINGS = ("steps", "chunks", "width", "layers", "heads", "dropout", "length", "batch", "lr", "seed")

# The model is plain PyTorch: an nn.Sequential with one layer per block.


class Embed(nn.Module):
    """Token plus position embedding: (batch, length), int64, to (batch, length, width)."""

    def __init__(self, width: int, length: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.empty(length, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeds windows of at most ``length`` tokens."""
        embedded: Tensor = self.dropout(self.token(tokens) + self.position[: tokens.shape[1]])
        return embedded


class Attention(nn.Module):
    """Causal self-attention over (batch, length, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Lets every position attend to itself and to the positions before it."""
        batch, length, width = x.shape
        split = self.queries_keys_values(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return result


class Block(nn.Module):
    """A pre-norm Transformer block over (batch, length, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Adds the outputs of the attention branch and then of the MLP branch to ``x``."""
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        result: Tensor = x + self.dropout(self.mlp(self.norm_mlp(x)))
        return result


def gpt(width: int, layers: int, heads: int, length: int, dropout: float = 0.0) -> nn.Sequential:
    """Returns the model: maps tokens (batch, length), int64, to next-token logits (batch, length, 256).

    Weights are initialised like GPT-2's: normal, and smaller where a branch joins the residual stream.

    Args:
        width: the size of a token's vector, a multiple of ``heads``.
        layers: the number of blocks; the Sequential also has an embedding and a head.
        heads: the number of attention heads.
        length: the maximum window length.
        dropout: the dropout probability, at the end of the embedding and of every branch.
    """
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False))
    blocks = [(f"block{i}", Block(width, heads, dropout)) for i in range(layers)]
    model = nn.Sequential(OrderedDict([("embed", Embed(width, length, dropout)), *blocks, ("head", head)]))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            joins = name.endswith(("attention.out.weight", "mlp.2.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if joins else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


def pipeline(args: argparse.Namespace) -> GPipe:
    """Cuts the model into stages with about equally many parameters, which run as threads on the CPU."""
    layers = gpt(args.width, args.layers, args.heads, args.length, args.dropout)
    balance = balance_by_cost(args.stages, [sum(p.numel() for p in layer.parameters()) for layer in layers])
    devices = ["cpu"] * len(balance)
    return GPipe(layers, balance, devices=devices, chunks=args.chunks, checkpoint=args.checkpoint)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean loss per token, in nats: logits (batch, length, 256), targets (batch, length)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Training:
    """The training state: model, optimiser, learning rate schedule, generator and losses.

    Attributes:
        model: maps tokens (batch, length) to logits (batch, length, 256); a `GPipe` or any other module.
        losses: the loss of every finished step, in bits per byte.
    """

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        self.model = model
        self.losses: list[float] = []
        self._args = args
        self._generator = torch.Generator().manual_seed(args.seed)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=True)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, self._factor)

    def _factor(self, step: int) -> float:
        """Returns the learning rate over its peak: it rises linearly, then falls to 1/20 along a cosine."""
        steps = self._args.steps
        warm_up = max(1, min(50, steps // 10))
        done = max(0, step - warm_up) / max(1, steps - warm_up)
        return float(min(1.0, (step + 1) / warm_up) * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2))

    def run(self, text: Tensor) -> None:
        """Trains on random windows of ``text``, uint8; Ctrl-C stops at the end of the current step."""
        steps, every = self._args.steps, min(max(1, self._args.steps // 10), 100)
        began, since = time.perf_counter(), len(self.losses)
        self.model.train()
        with deferred_interrupt() as interrupted:
            while len(self.losses) < steps and not interrupted.is_set():
                self.losses.append(self._step(text))
                if len(self.losses) % every == 0:
                    loss, now = fmean(self.losses[-every:]), time.perf_counter()
                    speed = (len(self.losses) - since) * self._args.batch * self._args.length / (now - began)
                    began, since = now, len(self.losses)
                    print(
                        f"  step {since}/{steps}: loss {loss:.3f} bits per byte, {speed:,.0f} bytes/s",
                        flush=True,
                    )

    def _step(self, text: Tensor) -> float:
        """Trains on one mini-batch: as with any module, since a pipeline is called like one."""
        args = self._args
        starts = torch.randint(len(text) - args.length, (args.batch,), generator=self._generator)
        tokens, targets = windows(text, starts, args.length)
        self._optimizer.zero_grad()
        loss = cross_entropy(self.model(tokens), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        return loss.item() / math.log(2)

    def state_dict(self) -> dict[str, Any]:
        """Returns the training state, including PyTorch's default generator, which dropout uses."""
        return {
            "step": len(self.losses),
            "losses": list(self.losses),
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "windows": self._generator.get_state(),
            "random": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the training state that ``state_dict`` returned."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self._generator.set_state(state["windows"])
        torch.set_rng_state(state["random"])
        self.losses = list(state["losses"])


@contextmanager
def deferred_interrupt() -> Iterator[Event]:
    """Sets the event on the first Ctrl-C, so that the current step can finish; a second Ctrl-C interrupts."""
    pressed, before = Event(), signal.getsignal(signal.SIGINT)

    def defer(*_: object) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, defer)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, args: argparse.Namespace) -> float:
    """Returns the mean loss, in bits per byte, over a fixed set of evenly spaced windows of ``text``."""
    model.eval()
    starts = evenly_spaced_starts(text, HELD_OUT_WINDOWS, args.length)
    total = 0.0
    for part in starts.split(args.batch):
        tokens, targets = windows(text, part, args.length)
        total += cross_entropy(model(tokens), targets).item() * len(part)
    return float(total / (len(starts) * math.log(2)))


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, count: int, length: int, seed: int) -> bytes:
    """Samples ``count`` bytes that continue ``prompt``; returns the prompt and the continuation.

    Every call gets a window of ``length`` tokens, so that the pipeline is lowered only once. The padding on
    the right has no effect: attention is causal, and only the logits of the last written byte are used.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    written = list(prompt)
    for _ in range(count):
        seen = written[-length:]
        tokens = torch.tensor([seen + [0] * (length - len(seen))])
        logits = model(tokens)[0, len(seen) - 1]
        probabilities = torch.softmax(logits / TEMPERATURE, dim=0)
        written.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(written)


def resume_settings(args: argparse.Namespace, text: Text) -> dict[str, Any]:
    """Returns the settings that a resumed run must share with the interrupted one."""
    digest = hashlib.sha256(text.training.numpy().tobytes()).hexdigest()
    return {name: getattr(args, name) for name in RESUME_SETTINGS} | {"text": digest}


def save_checkpoint(path: Path, training: Training, settings: dict[str, Any]) -> None:
    """Writes a checkpoint atomically; a plain ``nn.Sequential`` can load its ``"model"`` entry."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    torch.save({"settings": settings, **training.state_dict()}, unfinished)
    os.replace(unfinished, path)


def load_checkpoint(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Reads a checkpoint for `Training.load_state_dict`.

    Raises:
        ValueError: the file is missing, is not a checkpoint, or comes from a run with other settings.
    """
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path} to resume from")
    try:
        state: dict[str, Any] = torch.load(path)
        found = state["settings"]
    except Exception as error:
        raise ValueError(f"{path} is not a checkpoint of this demo: {error}") from error
    for name, value in settings.items():
        if name == "text" and found.get(name) != value:
            raise ValueError(f"the checkpoint {path} comes from a run on another text")
        if found.get(name) != value:
            raise ValueError(
                f"the checkpoint {path} comes from a run with --{name} {found.get(name)}, not {value}"
            )
    return state


def main(argv: Sequence[str] | None = None) -> None:
    """Builds, checks, trains and saves the model; then prints a sample, and reports on a step."""
    began = time.perf_counter()
    args, text, state = _settings(argv)
    torch.manual_seed(args.seed)
    model = pipeline(args)
    training = Training(model, args)
    _print_setup(args, model, text)

    starts = evenly_spaced_starts(text.training, args.batch, args.length)
    tokens, targets = windows(text.training, starts, args.length)

    def loss_fn(logits: Tensor) -> Tensor:
        return cross_entropy(logits, targets)

    print(f"\n{time_first_steps(model, tokens, loss_fn)}", flush=True)
    print(compare_bits(model, tokens, loss_fn), flush=True)
    if state is not None:
        training.load_state_dict(state)
        print(f"resuming after {len(training.losses)} of {args.steps} steps")

    print(f"\nfirst held-out loss: {held_out_loss(model, text.held_out, args):.3f} bits per byte", flush=True)
    training.run(text.training)
    save_checkpoint(args.save, training, resume_settings(args, text))
    print(f"checkpoint: {args.save} (a plain nn.Sequential can load its 'model' entry)", flush=True)
    print(f"last held-out loss: {held_out_loss(model, text.held_out, args):.3f} bits per byte", flush=True)

    sample = generate(model, PROMPT, args.sample, args.length, args.seed).decode("ascii", "backslashreplace")
    read = len(training.losses) * args.batch * args.length
    print(f"\nWhat the model writes after {PROMPT.decode()!r}, having read {read:,} bytes:")
    print(f"{'-' * 72}\n{sample}\n{'-' * 72}", flush=True)
    if len(training.losses) < args.steps:
        print(f"interrupted after {len(training.losses)} of {args.steps} steps; continue with --resume")
        return
    print(f"\n{draw_step(model, tokens, loss_fn, args.page)}\n", flush=True)
    print(compare(model, tokens, loss_fn, args.dropout > 0))
    print(f"\nfinished in {time.perf_counter() - began:.0f} s\n{_what_next(args)}")


def _settings(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Text, dict[str, Any] | None]:
    """Returns the checked options, the text, and the checkpoint to resume from, if any."""
    args = parse(argv)
    try:
        text = load(args.text)
        check_text(args, text)
        return args, text, load_checkpoint(args.save, resume_settings(args, text)) if args.resume else None
    except (OSError, ValueError) as error:
        command_line().error(str(error))


def _print_setup(args: argparse.Namespace, model: GPipe, text: Text) -> None:
    """Says what is trained on what, and what is cut where."""
    source = "Python's standard library" if args.text is None else args.text
    print(f"text: {source}: {len(text.training):,} bytes for training, {len(text.held_out):,} bytes held out")
    print(f"model: a GPT with {sum(p.numel() for p in model.parameters()):,} parameters, {len(model)} layers")
    print(f"pipeline: balance={model.balance} cuts it into {len(model.balance)} stages, each run by a thread")
    layers = iter(model.named_children())
    for stage, size in enumerate(model.balance):
        part = [next(layers) for _ in range(size)]
        count = sum(p.numel() for _, layer in part for p in layer.parameters())
        names = ", ".join(name for name, _ in part)
        print(f"  stage {stage} on {model.devices[stage]}: {names}; {count:,} parameters")
    microbatches = len(torch.empty(args.batch).chunk(args.chunks))
    threads = torch.get_num_threads()
    print(
        f"step: {args.batch} windows of {args.length} bytes in {microbatches} micro-batches, "
        f"checkpoint={model.checkpoint!r}, {threads} thread{'s' * (threads > 1)}"
    )
    if microbatches < args.chunks:
        print(f"note: a mini-batch of {args.batch} yields {microbatches} micro-batches, not {args.chunks}")


def _what_next(args: argparse.Namespace) -> str:
    return (
        "\nWhat to look at next:\n"
        f"  {args.page}: the step above, to zoom; open it in a browser\n"
        "  docs/getting_started.md: the same with your own model, step by step\n"
        "  examples/: this program (examples/gpt/__main__.py), and examples of other models\n"
        "  python -m examples.gpt --help: other options, such as --full for the whole training"
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
