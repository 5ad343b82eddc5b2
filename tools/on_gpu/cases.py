"""Small correctness cases for pipelines on a GPU: every model, plans in flight, autocast, and memory.

Most cases compare a pipeline with the plain loop, bit for bit, under deterministic algorithms, and report
which plans were replayed. Cases with fused kernels, which those algorithms turn off, compare errors against
float64. Cases of memory compare predicted with allocated bytes. `checks` runs the cases.
"""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.gpu.subjects import MAX_ERROR_RATIO
from bench.models.amoebanet import amoebanet_d
from bench.models.gpt import gpt
from bench.models.mlp import mlp
from bench.models.resnet import resnet
from bench.models.unet import unet
from bench.peers import relative_difference
from gpipe_fast import GPipe, doctor, verify
from gpipe_fast.fuse import left_out
from gpipe_fast.fuse.availability import why_unfused
from gpipe_fast.reports.doctor import replaced_by_graph
from gpipe_fast.runtime.stage_memory import block_bytes

STAGES, CHUNKS, BATCH, WIDTH = 4, 4, 16, 64
# The first two steps make plans; the third captures graphs.
STEPS = 5
DEVICE = "cuda:0"


@dataclass(frozen=True)
class Verdict:
    """The result of a case.

    Attributes:
        good: whether all tensors were equal and the expected replays happened.
        text: the differences, or 'equal'.
        captured: what was replayed, or what prevented a replay.
    """

    good: bool
    text: str
    captured: str = ""


def make_pipeline(model: nn.Sequential, device: str = DEVICE, **keywords: Any) -> GPipe:
    """Returns a pipeline of four stages on one GPU; 'all' distributes the stages over all visible GPUs."""
    cuts = [len(model) * stage // STAGES for stage in range(STAGES + 1)]
    balance = [end - begin for begin, end in itertools.pairwise(cuts)]
    count = torch.cuda.device_count()
    devices = [f"cuda:{i % count}" for i in range(STAGES)] if device == "all" else [device] * STAGES
    keywords = {"capture": True, **keywords}
    return GPipe(model, balance, devices=devices, chunks=CHUNKS, **keywords)


def graph_report_lines(pipe: GPipe) -> list[str]:
    """Returns the lines of the doctor's report about captured graphs."""
    lines = doctor(pipe).splitlines()
    begin = lines.index("CUDA graphs") + 1
    return [line.strip() for line in lines[begin:] if line.startswith("  ")]


def make_verdict(
    pipe: GPipe, found: Sequence[str], replays: int = STEPS - 2, otherwise: str = "equal"
) -> Verdict:
    """Returns the verdict: the differences, and whether some plan was replayed at least `replays` times."""
    lines = graph_report_lines(pipe)
    replayed = any(f"{count} mini-batches replayed" in line for line in lines for count in range(replays, 99))
    text = "; ".join(dict.fromkeys(found)) or otherwise
    return Verdict(not found and replayed, text if replayed else f"{text}; NOT REPLAYED", " / ".join(lines))


def loss_of(y: Tensor) -> Tensor:
    return y.float().square().mean()


# For each model: its constructor, the shape of a sample, and the vocabulary size (0: random noise).
MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...], int]] = {
    "mlp": (lambda: nn.Sequential(*(layer for _ in range(STAGES) for layer in mlp(WIDTH))), (WIDTH,), 0),
    "gpt": (lambda: gpt(4, WIDTH, 4, 128, 16), (16,), 128),
    "resnet": (lambda: resnet((1, 2), 5, 8), (3, 32, 32), 0),
    "unet": (lambda: unet(1, 8, depth=2), (3, 16, 16), 0),
    "amoebanet": (lambda: amoebanet_d(3, 16, 5), (3, 64, 64), 0),
}
# The first one needs only a few kernels.
FUSED_MODELS = ("mlp", "gpt")


def subject(name: str) -> tuple[nn.Sequential, Tensor]:
    """Returns a model and a mini-batch."""
    make, shape, vocab = MODELS[name]
    torch.manual_seed(0)
    model = make().to(DEVICE)
    x = torch.randint(vocab, (BATCH, *shape)) if vocab else torch.randn(BATCH, *shape)
    return model, x.to(DEVICE)


def find_differences(pipe: GPipe, x: Tensor, steps: int = STEPS) -> list[str]:
    """Returns the first and the last difference found in several steps: the worst tensor and its error."""
    found = []
    for step in range(steps):
        report = verify(pipe, x, loss_of)
        if not report:
            row = max((row for row in report.rows if not row.equal), key=lambda row: row.relative)
            found.append(f"step {step}: {report.headline}, {row.name} by {row.relative:.1e} of the largest")
    return found[:1] + found[-1:]


def model_case(
    name: str, device: str = DEVICE, dtype: torch.dtype = torch.float32, **keywords: Any
) -> Verdict:
    """Checks several steps of a model in a dtype; the last ones must be replayed."""
    model, x = subject(name)
    pipe = make_pipeline(model.to(dtype), device, **keywords)
    return make_verdict(pipe, find_differences(pipe, x.to(dtype) if x.is_floating_point() else x))


class PipelineAndLoop:
    """A pipeline, and the plain loop over a copy of its layers.

    Args:
        name: name of the model.
        autocast: dtype of autocast, which runs without its weight cache so that the loop is bitwise equal.
        keywords: arguments of the pipeline.
    """

    def __init__(self, name: str = "mlp", autocast: torch.dtype | None = None, **keywords: Any) -> None:
        model, self._x = subject(name)
        self.plain = copy.deepcopy(model)
        self.pipe = make_pipeline(model, **keywords)
        self.found: list[str] = []
        self._autocast = autocast

    def input(self, size: int, seed: int = 1) -> Tensor:
        """Returns `size` samples; each seed gives other samples."""
        x = self._x.roll(seed, 0)[:size]
        return x + seed if x.is_floating_point() else x

    def _cast(self) -> torch.autocast:
        dtype = self._autocast
        return torch.autocast("cuda", dtype or torch.bfloat16, dtype is not None, cache_enabled=False)

    def ours(self, x: Tensor) -> Tensor:
        with self._cast():
            y: Tensor = self.pipe(x)
        return y

    def loop(self, x: Tensor) -> Tensor:
        with self._cast():
            return torch.cat([self.plain(chunk) for chunk in x.chunk(CHUNKS)])

    def compare(self, what: str, run: Callable[[Callable[[Tensor], Tensor]], list[Tensor]]) -> None:
        """Runs `run` on both and compares the tensors that it returns and the parameters' gradients."""
        for parameter in (*self.pipe.parameters(), *self.plain.parameters()):
            parameter.grad = None
        ours, theirs = run(self.ours), run(self.loop)
        pairs = list(zip(self.pipe.parameters(), self.plain.parameters(), strict=True))
        gradients = [(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None]
        if not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
            self.found.append(f"{what}: outputs differ")
        if not all(torch.equal(a, b) for a, b in gradients):
            self.found.append(f"{what}: gradients differ")

    def train(self, size: int, steps: int = STEPS) -> None:
        def step(model: Callable[[Tensor], Tensor]) -> list[Tensor]:
            y = model(self.input(size))
            loss_of(y).backward()
            return [y.detach()]

        for _ in range(steps):
            self.compare(f"training of {size} samples", step)

    def infer(self, size: int, steps: int = STEPS) -> None:
        def step(model: Callable[[Tensor], Tensor]) -> list[Tensor]:
            with torch.no_grad():
                return [model(self.input(size))]

        for _ in range(steps):
            self.compare(f"inference of {size} samples", step)


def fused_case(name: str, autocast: torch.dtype | None = None) -> Verdict:
    """Compares several steps with fused kernels with float64: the error may be twice the plain loop's."""
    torch.use_deterministic_algorithms(False)  # they turn fused kernels off
    if reason := why_unfused(torch.device(DEVICE)):
        return Verdict(True, f"skipped: {reason}")
    pair = PipelineAndLoop(name, autocast)
    exact, found, errors = copy.deepcopy(pair.plain).double(), list[str](), ""
    for step in range(STEPS):
        x = pair.input(BATCH, step)
        wanted = _gradients(exact, x.double() if x.is_floating_point() else x, exact.parameters())
        ours = relative_difference(_gradients(pair.ours, x, pair.pipe.parameters()), wanted)
        loop = relative_difference(_gradients(pair.loop, x, pair.plain.parameters()), wanted)
        errors = f"error {ours:.1e} against float64, the plain loop's is {loop:.1e}"
        if not ours <= MAX_ERROR_RATIO * loop:
            found.append(f"step {step}: {errors}")
    found += [f"left out: {kernel}" for kernel in left_out.names()]
    replaced = sum(len(each) for _, _, each in replaced_by_graph(pair.pipe))
    if not replaced:
        found.append("no operators were replaced by fused kernels")
    return make_verdict(pair.pipe, found, otherwise=f"{errors}; {replaced} replacements")


def _gradients(
    model: Callable[[Tensor], Tensor], x: Tensor, parameters: Iterable[nn.Parameter]
) -> list[Tensor]:
    """Returns the output and the parameters' gradients of a step, in float64."""
    wanted = list(parameters)
    for parameter in wanted:
        parameter.grad = None
    output = model(x)
    output.double().square().mean().backward()
    gradients = [parameter.grad for parameter in wanted]
    return [t.detach().double() for t in (output, *gradients) if t is not None]


def autocast_case(name: str, dtype: torch.dtype) -> Verdict:
    pair = PipelineAndLoop(name, dtype)
    pair.train(BATCH)
    return make_verdict(pair.pipe, pair.found)


def two_shapes_case(first_back: bool, **keywords: Any) -> Verdict:
    """Runs two mini-batches of different shapes in flight; either backward may come first."""
    pair = PipelineAndLoop(**keywords)
    pair.train(BATCH)
    pair.train(BATCH // 2)

    def run(model: Callable[[Tensor], Tensor]) -> list[Tensor]:
        first, second = model(pair.input(BATCH, 2)), model(pair.input(BATCH // 2, 3))
        for y in (first, second) if first_back else (second, first):
            loss_of(y).backward()
        return [first.detach(), second.detach()]

    for _ in range(2):
        pair.compare("two in flight", run)
    return make_verdict(pair.pipe, pair.found)


def inference_between_case(trained_first: bool, size: int, **keywords: Any) -> Verdict:
    """Runs inference between a forward and its backward.

    Depending on `trained_first`, training or inference is captured first.
    """
    pair = PipelineAndLoop(**keywords)
    if trained_first:
        pair.train(BATCH)
    pair.infer(size)
    if not trained_first:
        pair.train(BATCH)

    def run(model: Callable[[Tensor], Tensor]) -> list[Tensor]:
        y = model(pair.input(BATCH, 2))
        with torch.no_grad():
            between = model(pair.input(size, 3))
        loss_of(y).backward()
        return [y.detach(), between]

    for _ in range(2):
        pair.compare("inference between", run)
    return make_verdict(pair.pipe, pair.found)


def model_cases() -> dict[str, Callable[[], Verdict]]:
    """Returns a case for each model, some with fused kernels, and one across GPUs if there are several."""
    found: dict[str, Callable[[], Verdict]] = {}
    for name in MODELS:
        found[name] = partial(model_case, name)
        if name in FUSED_MODELS:
            found[f"{name}, fused kernels"] = partial(fused_case, name)
    if torch.cuda.device_count() > 1:
        found |= {f"{name}, all GPUs": partial(model_case, name, "all") for name in MODELS}
    return found


def plan_cases() -> dict[str, Callable[[], Verdict]]:
    """Returns cases of plans in flight, limited memory, low precision, transports and checkpoint modes."""
    half = BATCH // 2
    found: dict[str, Callable[[], Verdict]] = {}
    for name, first in (("first", True), ("last", False)):
        found[f"two shapes in flight, {name} goes back first"] = partial(two_shapes_case, first)
    for mode in ("except_last", "never"):
        for name, trained in (("inference", False), ("training", True)):
            for what, size in (("another shape", half), ("the same shape", BATCH)):
                title = f"inference of {what} before a backward, {name} captured first, {mode}"
                found[title] = partial(inference_between_case, trained, size, checkpoint=mode)
    found["gpt, fused kernels, autocast to bfloat16"] = partial(fused_case, "gpt", torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16):
        word = str(dtype).removeprefix("torch.")
        found[f"gpt, autocast to {word}"] = partial(autocast_case, "gpt", dtype)
        found[f"resnet, autocast to {word}"] = partial(autocast_case, "resnet", dtype)
        found[f"gpt, {word}"] = partial(model_case, "gpt", dtype=dtype)
    for mode in ("always", "never"):
        found[f"unet, {mode}"] = partial(model_case, "unet", checkpoint=mode)
    for transport in ("peer", "pinned"):
        found[f"unet, {transport}"] = partial(model_case, "unet", transport=transport)
    return found


def allocated_bytes(pipe: GPipe, x: Tensor) -> int:
    """Returns the most bytes that a third step allocates beside the mini-batch; there is no loss."""
    for _ in range(3):
        pipe.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        y = pipe(x)
        y.backward(y.detach())
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - block_bytes(x.nbytes, x.device)


def _allocated_after_collection() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def memory_case(
    name: str, share: float | None = None, checkpoint: str = "always", **keywords: Any
) -> Verdict:
    """Compares the memory of a model in one stage with its prediction, or with a limit.

    Args:
        name: name of the model.
        share: where the limit is: 0 is what a step needs if everything is recomputed, 1 if nothing is.
            There is no limit if it is None.
        checkpoint: the setting if there is no limit.
        keywords: arguments of the pipeline.
    """

    def pipeline(**options: Any) -> tuple[GPipe, Tensor]:
        model, x = subject(name)
        return GPipe(model, [len(model)], devices=[DEVICE], chunks=CHUNKS, **options, **keywords), x

    def predicted(pipe: GPipe, x: Tensor) -> tuple[int, int]:
        """Returns what is predicted at least and at most."""
        (stage,) = pipe.memory(x.to("meta")).stages
        assert stage is not None, "a layer runs in Python"
        return stage.total - stage.waiting, stage.total

    torch.use_deterministic_algorithms(False)  # they turn fused kernels off
    setting: dict[str, Any] = {"checkpoint": checkpoint}
    if share is not None:
        least, most = (predicted(*pipeline(checkpoint=mode))[1] for mode in ("always", "never"))
        setting = {"memory": int(least + share * (most - least))}
    before = _allocated_after_collection()
    pipe, x = pipeline(**setting)
    found = allocated_bytes(pipe, x)
    low, high = predicted(pipe, x)
    del pipe, x
    found -= max(before, _allocated_after_collection())  # libraries keep workspaces
    text = f"{found:,} bytes, {found / high - 1:+.2%} of the predicted {high:,}"
    if share is not None:
        return Verdict(found <= setting["memory"], f"{text}; the limit is {setting['memory']:,}")
    return Verdict(0.98 * low <= found <= 1.02 * high, text)


def memory_cases() -> dict[str, Callable[[], Verdict]]:
    """Returns cases of predictions and limits, without fused kernels and graphs, and of limits by default."""
    plain: dict[str, Any] = {"fuse": False, "capture": False}
    found: dict[str, Callable[[], Verdict]] = {}
    for name in MODELS:
        for mode in ("always", "never"):
            found[f"{name}, {mode}"] = partial(memory_case, name, checkpoint=mode, **plain)
        if name == "amoebanet":  # plans take long
            continue
        for title, options in (("", plain), (", fused kernels", {})):
            found[f"{name}, a limit{title}"] = partial(memory_case, name, 0.5, **options)
    return found


PHASES: Mapping[str, Callable[[], dict[str, Callable[[], Verdict]]]] = {
    "models": model_cases,
    "plans": plan_cases,
    "memory": memory_cases,
}
