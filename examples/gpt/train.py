"""The demo's training loop, evaluation and sampling: ordinary PyTorch code for a module, here a `GPipe`."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from examples.gpt.text import evenly_spaced_starts, windows
from gpipe_fast import GPipe
from gpipe_fast.runtime.recording import Recording

HELD_OUT_WINDOWS = 256
RECORD_EVERY = 50  # steps
TEMPERATURE = 0.8


class Training:
    """The training state: model, optimiser, learning rate schedule, generator and losses.

    Attributes:
        model: maps tokens (batch, length) to logits (batch, length, 256).
        losses: the loss of every finished step, in bits per byte.
    """

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        self.model = model
        self.losses: list[float] = []
        self._args = args
        self._generator = torch.Generator().manual_seed(args.seed)
        self._optimizer, self._schedule = _optimizer(model, args)

    def run(self, text: Tensor) -> None:
        """Trains on random windows of ``text``, uint8; Ctrl-C stops at the end of the current step."""
        args, losses = self._args, self.losses
        tokens_per_step = args.batch * args.length
        bubble_text = ""
        self.model.train()
        with (
            DeferredInterrupt() as interrupt,
            _progress_bar(len(losses) * tokens_per_step, args.steps * tokens_per_step) as bar,
        ):
            while len(losses) < args.steps and not interrupt.pressed:
                with self._maybe_record() as recording:
                    losses.append(self._step(text))
                if recording:
                    bubble_text = f", bubble {recording.bubble():.1%}"
                bar.set_postfix_str(
                    f"loss {fmean(losses[-20:]):.3f} bits per byte{bubble_text}", refresh=False
                )
                bar.update(tokens_per_step)

    def _maybe_record(self) -> AbstractContextManager[Recording | None]:
        """Returns a context that records the step if it is one in ``RECORD_EVERY``."""
        if isinstance(self.model, GPipe) and len(self.losses) % RECORD_EVERY == 1:
            return self.model.recording()
        return nullcontext()

    def _step(self, text: Tensor) -> float:
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


def _progress_bar(tokens: int, all_tokens: int) -> Any:
    # A terminal redraws the bar in place; a log file keeps every update, so it gets fewer.
    interval = 0.5 if sys.stderr.isatty() else 15.0
    return tqdm(initial=tokens, total=all_tokens, unit=" tokens", unit_scale=True, mininterval=interval)


class DeferredInterrupt:
    """A context that defers the first Ctrl-C, so that the current step finishes; a second one interrupts.

    Attributes:
        pressed: whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.pressed = False

    def __enter__(self) -> DeferredInterrupt:
        self._before = signal.signal(signal.SIGINT, self._defer)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        signal.signal(signal.SIGINT, self._before)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean loss per token, in nats: logits (batch, length, 256), targets (batch, length)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _optimizer(
    model: nn.Module, args: argparse.Namespace
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """Returns AdamW, with weight decay on matrices only, and its schedule.

    The learning rate rises linearly, then falls to a twentieth along a cosine.
    """
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
