"""The subjects of the CUDA benchmark: models, mini-batches, and the candidates that train them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bench.compare.skip_connections import checkpointed, for_torchgpipe
from bench.comparison import Comparison, Opened
from bench.models.gpt import gpt
from bench.models.mlp import mlp
from bench.models.resnet import resnet, resnet101
from bench.models.unet import unet
from bench.peers import Step, has_torchgpipe, looped, relative_difference
from gpipe_fast import GPipe

STAGES = 4
# Limit for our error against float64, as a multiple of the plain loop's error.
MAX_ERROR_RATIO = 2.0
OURS, UNCAPTURED = "gpipe_fast, captured", "gpipe_fast, not captured"
UNFUSED = "gpipe_fast, no fused kernels"
PIPELINES = (OURS, UNFUSED, UNCAPTURED)
LOOP, COMPILED, TORCHGPIPE = "plain loop", "plain loop, torch.compile", "torchgpipe"
# The plain loop comes first: the errors of the others are judged by its error.
EAGER_CANDIDATES = (LOOP, *PIPELINES, TORCHGPIPE)


@dataclass(frozen=True)
class Subject:
    """A model in four stages, and steps of it.

    Attributes:
        make: builds the model.
        sample: the shape of a sample.
        batch: number of samples in a mini-batch.
        chunks: number of micro-batches.
        vocab: size of the vocabulary; None if samples are random noise.
        dtype: dtype of the parameters and of the noise.
        checkpoint: 'always' or 'never'.
        unit: unit of throughput, and number of units per sample.
        names: names of the candidates.
    """

    make: Callable[[], nn.Sequential]
    sample: tuple[int, ...]
    batch: int
    chunks: int
    vocab: int | None = None
    dtype: torch.dtype = torch.float32
    checkpoint: str = "always"
    unit: tuple[str, int] = ("samples", 1)
    names: tuple[str, ...] = EAGER_CANDIDATES

    def model(self, device: str) -> nn.Sequential:
        """Returns a new model; its parameters are the same on every call."""
        torch.manual_seed(0)
        with torch.device(device):
            return self.make().to(self.dtype)

    def data(self, device: str) -> tuple[Tensor, Tensor]:
        """Returns the mini-batch and the gradient of its output."""
        dtype = self.dtype if self.vocab is None else torch.long
        with torch.no_grad():
            output = self.model("meta")(torch.zeros((2, *self.sample), dtype=dtype, device="meta"))
        torch.manual_seed(1)
        shape, shape_out = (self.batch, *self.sample), (self.batch, *output.shape[1:])
        if self.vocab is None:
            x = torch.randn(shape, device=device, dtype=dtype)
        else:
            x = torch.randint(self.vocab, shape, device=device)
        return x, torch.randn(shape_out, device=device, dtype=self.dtype)

    def balance(self, layers: int) -> list[int]:
        """Returns the most even balance; longer partitions come last."""
        cuts = [layers * stage // STAGES for stage in range(STAGES + 1)]
        return [end - begin for begin, end in itertools.pairwise(cuts)]

    def candidates(self) -> list[str]:
        """Returns the names of the candidates that are installed."""
        return [name for name in self.names if name != TORCHGPIPE or has_torchgpipe()]

    def step(self, name: str, device: str, data: tuple[Tensor, Tensor], backend: str = "inductor") -> Step:
        """Returns a step of a candidate, with its own model."""
        model = self.model(device)
        balance, devices = self.balance(len(model)), [device] * STAGES
        pipeline: dict[str, Any] = {"devices": devices, "chunks": self.chunks, "checkpoint": self.checkpoint}
        forward: Callable[[Tensor], Tensor]
        if name in PIPELINES:
            fuse = False if name == UNFUSED else None
            forward = GPipe(model, balance, **pipeline, capture=name != UNCAPTURED, fuse=fuse)
        elif name == TORCHGPIPE:
            import torchgpipe

            forward = torchgpipe.GPipe(for_torchgpipe(model), balance, **pipeline)
        else:
            if name == COMPILED:
                for layer in model:
                    if any(True for _ in layer.parameters()):
                        layer.compile(dynamic=False, backend=backend)
            forward = looped(
                checkpointed(model, balance) if self.checkpoint == "always" else model, self.chunks
            )
        return Step(model.parameters(), forward, *data)

    def exact(self, device: str, data: tuple[Tensor, Tensor]) -> Step:
        """Returns a step of the plain loop in float64, from the same parameters and inputs."""
        model = self.model(device).double()
        x, gradient = (t.double() if t.is_floating_point() else t for t in data)
        return Step(model.parameters(), looped(model, self.chunks), x, gradient)


@dataclass(frozen=True)
class Row:
    """A measurement that runs in its own process.

    Attributes:
        title: title of the table.
        full: the subject in full size.
        small: a small subject of the same kind, for errors against float64.
        min_seconds: minimum time in seconds; with less time left, the row is skipped.
        rounds: maximum number of samples per candidate.
    """

    title: str
    full: Subject
    small: Subject
    min_seconds: int
    rounds: int = 15


_TINY = Subject(lambda: nn.Sequential(*(layer for _ in range(STAGES) for layer in mlp(64))), (64,), 64, 8)
_GPT = Subject(
    lambda: gpt(24, 1024, 16, vocab=50304),
    (1024,),
    64,
    8,
    vocab=50304,
    dtype=torch.bfloat16,
    unit=("tokens", 1024),
)
_SMALL_GPT = replace(_GPT, make=lambda: gpt(4, 32, 4, 128, 16), sample=(16,), batch=16, vocab=128)
_COMPILED_CANDIDATES = (LOOP, OURS, COMPILED)


def _gpt(chunks: int, names: tuple[str, ...], min_seconds: int) -> Row:
    what = "GPT, 24 layers, width 1024, sequence 1024, bfloat16"
    if COMPILED in names:
        what += ", with torch.compile"
    # At most 16 micro-batches, because the small subject's mini-batch has 16 sequences.
    small = replace(_SMALL_GPT, chunks=min(chunks, 16), names=names)
    return Row(f"{what}: M = {chunks}", replace(_GPT, chunks=chunks, names=names), small, min_seconds, 7)


# The most expensive rows come last.
ROWS = {
    "tiny-never": Row(
        "4 x 2 x (Linear(64, 64), ReLU), no recomputation",
        replace(_TINY, checkpoint="never"),
        replace(_TINY, checkpoint="never"),
        20,
        60,
    ),
    "tiny-always": Row("4 x 2 x (Linear(64, 64), ReLU), full recomputation", _TINY, _TINY, 20, 60),
    "gpt-8": _gpt(8, EAGER_CANDIDATES, 40),
    "resnet": Row(
        "ResNet-101, 224 x 224, float32",
        Subject(resnet101, (3, 224, 224), 128, 8, unit=("images", 1)),
        Subject(lambda: resnet((1, 2), 5, 8), (3, 32, 32), 16, 4),
        40,
    ),
    "unet": Row(
        "U-Net (5, 64), 192 x 192, float32",
        Subject(lambda: unet(5, 64), (3, 192, 192), 64, 8, unit=("images", 1)),
        Subject(lambda: unet(1, 8, depth=2, dropout=0.0), (3, 16, 16), 16, 4),
        40,
    ),
    "gpt-32": _gpt(32, EAGER_CANDIDATES, 45),
    "gpt-8-compiled": _gpt(8, _COMPILED_CANDIDATES, 60),
    "gpt-32-compiled": _gpt(32, _COMPILED_CANDIDATES, 60),
}


def comparison(title: str, subject: Subject, device: str, small: Subject | None = None) -> Comparison:
    """Returns the comparison of a subject's candidates.

    Args:
        title: its name.
        subject: what is timed.
        device: the device of all stages. On a CPU, gradients are compared with the plain loop's.
        small: on a GPU, the subject whose gradients are compared with float64.
    """
    names = sorted(subject.candidates(), key=lambda name: name != OURS)

    def synchronized(step: Step) -> Callable[[], None]:
        def run() -> None:
            step()
            torch.cuda.synchronize()

        for _ in range(4):  # makes plans, captures graphs and replays them
            run()
        return run

    def opened(stack: ExitStack) -> Opened:
        data = subject.data(device)
        if small is not None:
            check_errors(small, names, device)
            return {name: synchronized(subject.step(name, device, data)) for name in names}, None
        steps = {name.removesuffix(", captured"): subject.step(name, device, data) for name in names}
        steps[LOOP]()
        return steps, [gradient.clone() for gradient in steps[LOOP].gradients()]

    shown = names if small is not None else [name.removesuffix(", captured") for name in names]
    return Comparison(title, shown, opened, sampled=True)


def check_errors(subject: Subject, names: Sequence[str], device: str) -> None:
    """Asserts that the error of our gradients against float64 is at most twice the plain loop's."""
    data, errors = subject.data(device), {}
    exact = subject.exact(device, data)
    exact()
    for name in names:
        step = subject.step(name, device, data)
        for _ in range(4):
            step()
        errors[name] = relative_difference([g.double() for g in step.gradients()], exact.gradients())
    for name in set(names) & set(PIPELINES):
        assert errors[name] <= MAX_ERROR_RATIO * errors[LOOP], f"{name}: {errors[name]} of {errors}"


def with_small_subject(row: Row) -> Row:
    """Returns the row with its small subject, for machines without a GPU."""
    return replace(row, full=row.small, rounds=2)
