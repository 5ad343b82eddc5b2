"""Helpers of the demo's tests: a tiny model, and Ctrl-C in the middle of a step."""

from __future__ import annotations

import argparse
import itertools
import signal
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from examples.gpt.__main__ import Training, gpt
from examples.gpt.options import command_line
from examples.gpt.text import Text
from gpipe_fast import GPipe, keyed_rng

SIZES = {
    "width": 16,
    "layers": 2,
    "heads": 2,
    "length": 16,
    "batch": 6,
    "chunks": 3,
    "threads": 1,
    "sample": 20,
}
TINY = [f"--{name}={value}" for name, value in SIZES.items()]


def tiny(*more: str) -> argparse.Namespace:
    return command_line().parse_args([*TINY, *more])


def tiny_model(args: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(args.seed)
    return gpt(args.width, args.layers, args.heads, args.length, args.dropout)


def piped(args: argparse.Namespace, balance: Sequence[int] = (2, 2)) -> GPipe:
    return GPipe(tiny_model(args), balance, chunks=args.chunks, checkpoint=args.checkpoint)


class MicroBatches(nn.Module):
    """The reference for `GPipe`: the plain model, one micro-batch after the other."""

    def __init__(self, layers: nn.Sequential, chunks: int) -> None:
        super().__init__()
        self.layers = layers
        self.chunks = chunks

    def forward(self, input: Tensor) -> Tensor:
        with keyed_rng(self.layers):
            return torch.cat([self.layers(c) for c in input.chunk(self.chunks)])


def trained(model: nn.Module, args: argparse.Namespace, text: Text) -> Training:
    training = Training(model, args)
    training.run(text.training)
    return training


def press_ctrl_c(model: nn.Module, step: int, times: int = 1) -> None:
    """Raises SIGINT ``times`` times in the middle of the given step, counted from 1."""
    steps = itertools.count(1)

    def press(*_: object) -> None:
        if next(steps) == step:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    model.register_forward_pre_hook(press)
