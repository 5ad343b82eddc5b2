"""A self-test that compares small models with the plain loop on this machine's devices, as a report."""

from __future__ import annotations

import contextlib
import copy
import os
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, permutations, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import devices as _devices
from gpipe_fast.devices import Device
from gpipe_fast.fuse import left_out
from gpipe_fast.fuse.accuracy import error_ratio
from gpipe_fast.fuse.availability import why_unfused
from gpipe_fast.lower.checkpoint import CHECKPOINT_MODES
from gpipe_fast.reports.doctor import doctor, replaced_by_graph
from gpipe_fast.reports.verify import Report, verify
from gpipe_fast.runtime.settings import TRANSPORTS
from gpipe_fast.skip import pop, skippable, stash

NUM_STAGES, CHUNKS, BATCH = 2, 4, 8
# On GPUs, the third mini-batch is captured and the fourth is replayed.
STEPS_ON_GPUS = 4
# The time in seconds after which no further comparison begins.
TIME_LIMIT_SECONDS = 120.0
MAX_MESSAGE_LENGTH = 160
# The error of a step with fused kernels may be this many times that of one without, or this many roundings:
# more than a single kernel's, since errors add up. A wrong kernel's error is many thousands of roundings.
MAX_RATIO, MAX_ROUNDINGS = 4.0, 16.0
# The class `GPipe`.
Pipeline = Callable[..., Any]
# Widths of the columns of the report, except the last one.
WIDTHS = (24, 11, 13)


@dataclass(frozen=True)
class Case:
    """One model in one checkpoint mode over one transport.

    Attributes:
        model: the name of the model.
        transport: the transport between its stages.
        checkpoint: the checkpoint mode.
        ok: whether all tensors equal those of the plain loop, bit for bit.
        result: the result in words.
    """

    model: str
    transport: str
    checkpoint: str
    ok: bool
    result: str


@dataclass(frozen=True)
class FusedCheck:
    """The result of `check_fused`.

    Attributes:
        ok: False if fused kernels gave wrong results, were left out, or were not used where they should be.
        result: the result in words.
    """

    ok: bool
    result: str


@dataclass(frozen=True)
class Checkup:
    """The result of `check`: true if nothing is wrong; its string is a report to paste.

    Attributes:
        machine: versions and devices, as `doctor` reports them.
        stages: the device of each stage.
        cases: the cases in the order in which they ran.
        fused: the self-test of fused kernels.
        left_out: cases and transports that were skipped, each with the reason.
        seconds: the duration of the whole check.
    """

    machine: str
    stages: tuple[str, ...]
    cases: tuple[Case, ...]
    fused: FusedCheck
    left_out: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every case that ran is equal to the plain loop, and fused kernels are not wrong."""
        return self.fused.ok and bool(self.cases) and all(case.ok for case in self.cases)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def headline(self) -> str:
        """The result in one line."""
        wrong = sum(not case.ok for case in self.cases)
        result = f"{wrong} of {len(self.cases)} cases differ from the plain loop or failed"
        if not wrong:
            result = f"all {len(self.cases)} cases equal the plain loop bit for bit"
        left_out = f", {len(self.left_out)} skipped" if self.left_out else ""
        fused = "" if self.fused.ok else "; the self-test of fused kernels failed"
        return f"{result}{left_out}{fused} ({self.seconds:.0f} s)"

    def __str__(self) -> str:
        return "\n".join([_head(self.machine, self.stages), *map(_row, self.cases), self._tail()])

    def _tail(self) -> str:
        left_out = "".join(f"skipped: {each}\n" for each in self.left_out)
        return f"\n{left_out}fused kernels: {self.fused.result}\n{self.headline}"


def _line(*cells: str) -> str:
    return "  ".join([*(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=False)), cells[-1]])


def _head(machine: str, stages: Sequence[str]) -> str:
    last = f"on {', '.join(stages)}"
    rule = _line(*("-" * width for width in WIDTHS), "-" * len(last))
    return f"{machine}\n\n{_line('model', 'transport', 'checkpoint', last)}\n{rule}"


def _row(case: Case) -> str:
    return _line(case.model, case.transport, case.checkpoint, case.result)


def check(
    pipeline: Pipeline,
    devices: Iterable[Device] | None = None,
    show: Callable[[str], object] | None = None,
) -> Checkup:
    """As for `gpipe_fast.doctor.check`; ``pipeline`` is the class `GPipe`, which reports do not import."""
    begun, show = time.monotonic(), show or (lambda text: None)
    stage_devices = _stage_devices(devices)
    stages, machine = tuple(map(str, stage_devices)), doctor()
    show(_head(machine, stages))
    on_gpus = any(device.type == "cuda" for device in stage_devices)
    transports, left_out = _transports(stage_devices)
    cases = list[Case]()
    with _deterministic(on_gpus), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for transport, model, checkpoint in product(transports, MODELS, CHECKPOINT_MODES):
            if time.monotonic() - begun > TIME_LIMIT_SECONDS:
                reached = f"the time limit of {TIME_LIMIT_SECONDS:g} s was reached"
                left_out.append(f"{model}, {transport}, {checkpoint}: {reached}")
                continue
            found = _compare(pipeline, MODELS[model], stage_devices, transport, checkpoint)
            cases.append(Case(model, transport if on_gpus else "hand-over", checkpoint, *found))
            show(_row(cases[-1]))
        fused = _check_fused(pipeline, stage_devices)
    seconds = time.monotonic() - begun
    checkup = Checkup(machine, stages, tuple(cases), fused, tuple(left_out), seconds)
    show(checkup._tail())
    return checkup


@contextlib.contextmanager
def _deterministic(on_gpus: bool) -> Iterator[None]:
    """Makes PyTorch's algorithms deterministic inside a block, if stages are on GPUs."""
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(on_gpus or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _check_fused(pipeline: Pipeline, stage_devices: list[torch.device]) -> FusedCheck:
    """Checks fused kernels on the first GPU."""
    device = next((device for device in stage_devices if device.type == "cuda"), stage_devices[0])
    torch.manual_seed(0)
    layers = nn.Sequential(_Block(64, 4), nn.Dropout(0.1), nn.LayerNorm(64))
    return check_fused(pipeline, layers, torch.randn(BATCH, 64, 64), device=device)


def check_fused(pipeline: Pipeline, layers: nn.Sequential, x: Tensor, device: torch.device) -> FusedCheck:
    """Trains one stage with and without fused kernels, and compares both with the stage in float64.

    Args:
        pipeline: the class `GPipe`.
        layers: the layers of the stage, on the CPU, in float32; they are copied. Fused kernels should
            replace some of their operators.
        x: a mini-batch, on the CPU.
        device: the device of the stage.
    """
    if reason := why_unfused(device):
        return FusedCheck(True, f"skipped: {reason}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = _one_stage(pipeline, layers, device, fuse=True)
            found = _results(model, x.to(device))
            plain = _results(_one_stage(pipeline, layers, device, fuse=False), x.to(device))
            wide = _one_stage(pipeline, copy.deepcopy(layers).double(), device, fuse=False)
            exact = _results(wide, x.to(device, torch.float64))
    except Exception as error:
        return FusedCheck(False, _failure(error))
    if left_out.names():
        return FusedCheck(False, f"WRONG, or not compiled or loaded: {', '.join(left_out.names())}")
    replaced = sum(len(each) for _, _, each in replaced_by_graph(model))
    if not replaced:
        return FusedCheck(False, "NOT USED: no operators of the stage were replaced")
    each = zip(found, plain, exact, strict=True)
    worst = max(error_ratio(*own, factor=MAX_RATIO, roundings=MAX_ROUNDINGS) for own in each)
    text = f"the largest error is {worst:.2g} times the error allowed ({replaced} replacements)"
    return FusedCheck(worst <= 1, text if worst <= 1 else f"WRONG: {text}")


def _one_stage(pipeline: Pipeline, layers: nn.Sequential, device: torch.device, fuse: bool) -> Any:
    own = copy.deepcopy(layers)
    return pipeline(own, [len(own)], devices=[device], chunks=2, checkpoint="always", fuse=fuse)


def _results(model: Any, x: Tensor) -> list[Tensor]:
    """Returns the output and all gradients of the last step."""
    for _ in range(STEPS_ON_GPUS):
        torch.manual_seed(0)
        model.zero_grad()
        own = x.detach().requires_grad_()
        own.grad = None
        output = model(own)
        output.backward(torch.linspace(-1, 1, output.numel(), device=x.device).view_as(output).to(x.dtype))
    gradients = [own.grad, *(parameter.grad for parameter in model.parameters())]
    return [t.detach() for t in (output, *gradients) if t is not None]


def _stage_devices(devices: Iterable[Device] | None) -> list[torch.device]:
    if devices is not None:
        listed = _devices.parse_devices(devices)
        return _devices.checked_devices(listed, max(NUM_STAGES, len(listed)))
    visible = _devices.default_devices() or [torch.device("cpu")]
    return list(islice(cycle(visible), NUM_STAGES))


def _transports(stage_devices: list[torch.device]) -> tuple[list[str], list[str]]:
    """Returns the transports that these devices support, and a line for each one that is skipped."""
    gpus = {device for device in stage_devices if device.type == "cuda"}
    if not gpus:
        return ["auto"], []
    pairs = [(a, b) for a, b in permutations(gpus, 2) if not torch.cuda.can_device_access_peer(a, b)]
    if not pairs:
        return list(TRANSPORTS), []
    one, other = pairs[0]
    usable = [transport for transport in TRANSPORTS if transport != "peer"]
    return usable, [f"transport 'peer': {one} has no peer access to {other}"]


def _compare(
    pipeline: Pipeline,
    make: Callable[[], tuple[nn.Sequential, Tensor]],
    stage_devices: list[torch.device],
    transport: str,
    checkpoint: str,
) -> tuple[bool, str]:
    """Returns whether a model equals the plain loop, and the result in words."""
    try:
        torch.manual_seed(0)
        layers, x = make()
        size, more = divmod(len(layers), len(stage_devices))
        balance = [size + (stage < more) for stage in range(len(stage_devices))]
        options: dict[str, Any] = {"chunks": CHUNKS, "checkpoint": checkpoint, "transport": transport}
        model = pipeline(layers, balance, devices=stage_devices, capture=True, **options)
        x = x.to(stage_devices[0])
        steps = STEPS_ON_GPUS if any(device.type == "cuda" for device in stage_devices) else 1
        reports = [verify(model, x, lambda y: y.square().mean()) for _ in range(steps)]
    except Exception as error:
        return False, _failure(error)
    return all(reports), _describe(min(reports, key=bool))


def _failure(error: Exception) -> str:
    first_line = str(error).partition("\n")[0][:MAX_MESSAGE_LENGTH]
    return f"FAILED: {type(error).__name__}: {first_line}"


def _describe(report: Report) -> str:
    if report:
        return f"equal, {len(report.rows)} tensors"
    unequal = [row for row in report.rows if not row.equal]
    worst = max(unequal, key=lambda row: row.relative)
    return (
        f"{len(unequal)} of {len(report.rows)} tensors DIFFER, {worst.name} by {worst.difference:.3g} "
        f"({worst.relative:.3g} of its largest element)"
    )


class _Block(nn.Module):
    """A transformer block: causal attention and a feed-forward network, each with a preceding norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        output: Tensor = x + self.feed_forward(self.norms[1](x))
        return output


class _Branch(nn.Module):
    """A layer with data-dependent control flow, which therefore runs in Python."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() if x.sum() > 0 else x.sigmoid()


@skippable(stash=["skip"])
class _Down(nn.Module):
    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("skip", x)
        return x.tanh()


@skippable(pop=["skip"])
class _Up(nn.Module):
    def forward(self, x: Tensor) -> Generator[pop, Any, Tensor]:
        skip: Tensor = yield pop("skip")
        return x * skip


def _dropout() -> tuple[nn.Sequential, Tensor]:
    layers = (nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16), nn.Dropout(0.2))
    return nn.Sequential(*layers), torch.randn(BATCH, 16)


def _convolutions() -> tuple[nn.Sequential, Tensor]:
    # No pooling layer, since its backward is not deterministic on GPUs.
    first = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
    second = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(8 * 4 * 4, 5)), torch.randn(BATCH, 3, 8, 8)


def _gpt() -> tuple[nn.Sequential, Tensor]:
    layers = nn.Embedding(32, 16), _Block(16, 2), nn.Dropout(0.1), _Block(16, 2), nn.Linear(16, 32)
    return nn.Sequential(*layers), torch.randint(32, (BATCH, 6))


def _branch() -> tuple[nn.Sequential, Tensor]:
    layers = nn.Linear(16, 16), _Branch(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    return nn.Sequential(*layers), torch.randn(BATCH, 16)


def _skip() -> tuple[nn.Sequential, Tensor]:
    layers = nn.Linear(16, 16), _Down(), nn.Linear(16, 16), nn.Dropout(0.2), _Up(), nn.Linear(16, 4)
    return nn.Sequential(*layers), torch.randn(BATCH, 16)


MODELS: dict[str, Callable[[], tuple[nn.Sequential, Tensor]]] = {
    "MLP with dropout": _dropout,
    "convolutions, batch norm": _convolutions,
    "GPT": _gpt,
    "a layer in Python": _branch,
    "a skip connection": _skip,
}
