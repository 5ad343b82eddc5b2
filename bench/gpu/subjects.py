"""The subjects of the CUDA benchmark: models, mini-batches, and the candidates that train them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bench.case_processes import failure, free
from bench.compare.skip_connections import checkpointed, for_torchgpipe
from bench.comparison import Comparison, Opened
from bench.models.gpt import gpt
from bench.models.llama import llama
from bench.models.mlp import mlp
from bench.peers import Forward, Step, has_torchgpipe, looped, relative_difference
from bench.peers import checkpointed as checkpointed_stages
from gpipe_fast import GPipe

STAGES = 4
# Steps before the counted ones: they make plans, capture graphs and replay them.
WARM_UP = 4
# Limit for our error against float64, as a multiple of the plain loop's error.
MAX_ERROR_RATIO = 2.0
OURS, UNCAPTURED = "gpipe_fast, captured", "gpipe_fast, not captured"
UNFUSED, UNFUSED_UNCAPTURED = "gpipe_fast, no fused kernels", "gpipe_fast, not captured, no fused kernels"
# The checkpoint mode that recomputes everything but attention.
EXCEPT_ATTENTION = "except_attention"
# The arguments of each pipeline; the later ones are levers, each beside the steps without it.
PIPELINES: dict[str, dict[str, Any]] = {
    OURS: {"capture": True},
    UNFUSED: {"fuse": False, "capture": True},
    UNCAPTURED: {"capture": False},
    UNFUSED_UNCAPTURED: {"fuse": False, "capture": False},
    "gpipe_fast, captured where launches do not hide": {"capture": "auto"},
    "gpipe_fast, captured, attention saved": {"capture": True, "checkpoint": EXCEPT_ATTENTION},
}
LOOP, TORCHGPIPE = "plain loop", "torchgpipe"
STAGES_COMPILED = ("plain loop, each stage compiled", "plain loop, each stage compiled, reduce-overhead")
# The plain loop comes first: the errors of the others are judged by its error.
OWN_CANDIDATES = (LOOP, OURS, UNFUSED, UNCAPTURED)
EAGER_CANDIDATES = (*OWN_CANDIDATES, TORCHGPIPE)


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
        checkpoint: as for `GPipe`; the plain loops recompute everything, or nothing for 'never'.
        unit: unit of throughput, and number of units per sample.
        names: names of the candidates.
    """

    make: Callable[[], nn.Sequential]
    sample: tuple[int, ...]
    batch: int
    chunks: int
    vocab: int | None = None
    dtype: torch.dtype = torch.float32
    checkpoint: str | float = "always"
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
        if name in PIPELINES:
            return self.ours(device, data, **PIPELINES[name])
        model = self.model(device)
        balance, recompute = self.balance(len(model)), self.checkpoint != "never"
        forward: Forward
        if name == TORCHGPIPE:
            import torchgpipe

            forward = torchgpipe.GPipe(for_torchgpipe(model), balance, **self._settings(device))
        elif name == LOOP:
            forward = looped(checkpointed(model, balance) if recompute else model, self.chunks)
        else:
            mode = "reduce-overhead" if name.endswith("reduce-overhead") else "default"
            loop = compiled(model, balance, recompute, mode, backend)
            forward = _as_one_iteration(looped(loop, self.chunks))
        return Step(model.parameters(), forward, *data)

    def _settings(self, device: str) -> dict[str, Any]:
        return {"devices": [device] * STAGES, "chunks": self.chunks, "checkpoint": self.checkpoint}

    def ours(self, device: str, data: tuple[Tensor, Tensor], **options: Any) -> Step:
        """Returns a step of a pipeline with its own model, which is the step's attribute ``forward``."""
        model = self.model(device)
        pipe = GPipe(model, self.balance(len(model)), **{**self._settings(device), **options})
        return Step(model.parameters(), pipe, *data)

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
        rounds: maximum number of samples per candidate.
        untimed: candidates whose numbers are checked only.
    """

    title: str
    full: Subject
    small: Subject
    rounds: int = 15
    untimed: tuple[str, ...] = ()


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
_WIDE = replace(_GPT, make=lambda: gpt(8, 4096, 32, vocab=50304), batch=32)
_LLAMA = Subject(
    lambda: llama(8, 4096, 32, 8, 11008, 2048),
    (2048, 4096),
    16,
    8,
    dtype=torch.bfloat16,
    unit=("tokens", 2048),
    names=OWN_CANDIDATES,
)


def _gpt(
    checkpoint: str = "always",
    names: tuple[str, ...] = OWN_CANDIDATES,
    full: Subject = _GPT,
    size: str = "24 layers, width 1024",
    untimed: tuple[str, ...] = (),
) -> Row:
    settings: dict[str, Any] = {"checkpoint": checkpoint, "names": names}
    title = f"GPT, {size}, sequence 1024, bfloat16: M = {full.chunks}, checkpoint {checkpoint!r}"
    return Row(title, replace(full, **settings), replace(_SMALL_GPT, **settings), 7, untimed)


# A mini-batch of which nothing is recomputed takes half of an H200, and captured graphs keep it: candidates
# with graphs have rows of their own.
_ALONE: dict[str, Any] = {"checkpoint": "never", "untimed": (LOOP,)}
# In the order of a run, what matters most first.
ROWS = {
    "gpt-8": _gpt(names=EAGER_CANDIDATES),
    "gpt-8-except-attention": _gpt(EXCEPT_ATTENTION),
    "gpt-8-never": _gpt("never", (LOOP, UNCAPTURED)),
    "gpt-8-stages": _gpt(names=(LOOP, OURS, UNCAPTURED, *STAGES_COMPILED)),
    "gpt-8-never-stages": _gpt(names=(LOOP, UNCAPTURED, STAGES_COMPILED[0]), **_ALONE),
    "tiny-never": Row(
        "4 x 2 x (Linear(64, 64), ReLU), no recomputation",
        replace(_TINY, checkpoint="never"),
        replace(_TINY, checkpoint="never"),
        60,
    ),
    "tiny-always": Row("4 x 2 x (Linear(64, 64), ReLU), full recomputation", _TINY, _TINY, 60),
    "gpt-8-levers": _gpt(names=(LOOP, *PIPELINES)),
    "llama": Row(
        "Llama, 8 blocks, width 4096, sequence 2048, bfloat16",
        _LLAMA,
        replace(_LLAMA, make=lambda: llama(4, 32, 4, 2, 64, 16), sample=(16, 32)),
        7,
    ),
    "gpt-wide": _gpt(full=_WIDE, size="8 layers, width 4096"),
    "gpt-8-never-captured": _gpt(names=(LOOP, OURS), **_ALONE),
}


def _as_one_iteration(forward: Forward) -> Forward:
    """Returns a forward that begins an iteration: until the next, CUDA graphs of Inductor keep their results.

    Without it, each call may overwrite those of other micro-batches, and a recompute is such a call.
    """

    def marked(input: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return forward(input)

    return marked


def compiled(
    model: nn.Sequential, balance: Sequence[int], recompute: bool, mode: str, backend: str
) -> Forward:
    """Returns a model that torch.compile compiles stage by stage.

    Args:
        model: the model, without skip connections.
        balance: the layers of each stage.
        recompute: whether each stage is recomputed as a whole in the backward.
        mode: torch.compile's mode.
        backend: torch.compile's backend.
    """
    # Stages share their code, which is compiled again for each; without more, it would run uncompiled.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    options: dict[str, Any] = {"dynamic": False, "mode": mode, "backend": backend}
    layers = iter(model)
    stages: list[Any] = [nn.Sequential(*itertools.islice(layers, size)) for size in balance]
    stages = [torch.compile(stage, **options) for stage in stages]
    return checkpointed_stages(stages) if recompute else nn.Sequential(*stages)


class Synchronized:
    """A step that ends when its device has finished.

    Attributes:
        step: the step.
        kept: the bytes that are in use only because of earlier runs, such as gradients.
    """

    kept = 0

    def __init__(self, step: Step, device: str) -> None:
        self.step = step
        self._on_gpu = torch.device(device).type == "cuda"

    def __call__(self) -> None:
        self.step()
        if self._on_gpu:
            torch.cuda.synchronize()

    def peak_bytes(self) -> int | None:
        """Returns what is in use at most in a run, beyond what was in use before the first; None on a CPU."""
        if not self._on_gpu:
            return None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self()
        return torch.cuda.max_memory_allocated() - before + self.kept


def bytes_in_use() -> int:
    """Returns the bytes of tensors on all GPUs, and of the memory that captured graphs keep to themselves."""
    if not torch.cuda.is_available():
        return 0
    own = [segment for segment in torch.cuda.memory_snapshot() if segment["segment_pool_id"] != (0, 0)]
    reserved: int = sum(segment["total_size"] - segment["allocated_size"] for segment in own)
    return reserved + sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))


def errors_of(
    subject: Subject, names: Sequence[str], device: str, backend: str = "inductor"
) -> dict[str, float | str]:
    """Returns each candidate's largest gradient error against float64 in several steps, or why not."""
    data = subject.data(device)
    exact, found = subject.exact(device, data), dict[str, float | str]()
    exact()
    for name in names:
        try:
            step = subject.step(name, device, data, backend)
            offs = []
            for _ in range(WARM_UP):
                step()
                offs.append(relative_difference([g.double() for g in step.gradients()], exact.gradients()))
            found[name] = max(offs)
        except Exception as error:
            found[name] = failure(error)
    return found


def steps_of(
    subject: Subject, names: Sequence[str], device: str, backend: str = "inductor"
) -> dict[str, Synchronized | str]:
    """Returns the step of each candidate after steps that make plans and capture graphs, or why not."""
    data, found = subject.data(device), dict[str, Synchronized | str]()
    for name in names:
        try:
            step = found[name] = Synchronized(subject.step(name, device, data, backend), device)
            before = bytes_in_use()
            for _ in range(WARM_UP):
                step()
            step.kept = bytes_in_use() - before
        except Exception as error:
            found[name] = failure(error)
        free()
    return found


def comparison(title: str, subject: Subject, device: str) -> Comparison:
    """Returns the comparison of a subject's candidates, with gradients that equal the plain loop's."""
    names = {name.removesuffix(", captured"): name for name in subject.candidates()}
    names = dict(sorted(names.items(), key=lambda item: item[1] != OURS))

    def opened(stack: ExitStack) -> Opened:
        data = subject.data(device)
        steps = {shown: subject.step(name, device, data) for shown, name in names.items()}
        steps[LOOP]()
        return steps, [gradient.clone() for gradient in steps[LOOP].gradients()]

    title += f"; 4 stages, M = {subject.chunks}, {subject.checkpoint}"
    return Comparison(title, list(names), opened, sampled=True)
