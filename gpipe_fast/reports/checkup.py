"""A self-test that compares small models with the plain loop on this machine's devices, as a report."""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
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
from gpipe_fast.layers.structure import Inputs
from gpipe_fast.lower.checkpoint import CHECKPOINT_MODES
from gpipe_fast.reports.doctor import doctor, replaced_by_graph
from gpipe_fast.reports.tables import failure
from gpipe_fast.reports.verify import run_step, verify
from gpipe_fast.runtime.settings import TRANSPORTS
from gpipe_fast.skip import pop, skippable, stash

NUM_STAGES, CHUNKS, BATCH = 2, 4, 8
# On GPUs, the third mini-batch is captured and the fourth is replayed.
STEPS_ON_GPUS = 4
MAX_MESSAGE_LENGTH = 160
# The error of a step with fused kernels may be this many times that of one without, or this many roundings:
# more than a single kernel's, since errors add up. A wrong kernel's error is many thousands of roundings.
MAX_RATIO, MAX_ROUNDINGS = 4.0, 16.0
# The class `GPipe`.
Pipeline = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One model in one checkpoint mode over one transport; the last one is for fused kernels.

    Attributes:
        model: the name of the model.
        transport: the transport between its stages.
        checkpoint: the checkpoint mode.
        ok: whether all tensors equal those of the plain loop, bit for bit; of fused kernels, whether they are
            used where they should be, with the errors that they may have.
        result: the result in words.
    """

    model: str
    transport: str
    checkpoint: str
    ok: bool
    result: str

    def __str__(self) -> str:
        return f"{self.model:24}  {self.transport:9}  {self.checkpoint:16}  {self.result}"


@dataclass(frozen=True)
class Checkup:
    """The result of `check`: true if nothing is wrong; its string is a report to paste.

    Attributes:
        machine: versions and devices, as `doctor` reports them.
        stages: the device of each stage.
        cases: the cases in the order in which they ran.
        seconds: the duration of the whole check.
    """

    machine: str
    stages: tuple[str, ...]
    cases: tuple[Case, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every case is right."""
        return all(case.ok for case in self.cases)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def headline(self) -> str:
        """The result in one line."""
        wrong = sum(not case.ok for case in self.cases)
        result = f"{wrong} of {len(self.cases)} cases differ from the plain loop or failed"
        if not wrong:
            result = f"all {len(self.cases)} cases are right"
        return f"{result}, on {', '.join(self.stages)} ({self.seconds:.0f} s)"

    def __str__(self) -> str:
        return "\n".join([self.machine, "", *map(str, self.cases), "", self.headline])


def check(
    pipeline: Pipeline,
    devices: Iterable[Device] | None = None,
    show: Callable[[str], object] | None = None,
) -> Checkup:
    """As for `gpipe_fast.doctor.check`; ``pipeline`` is the class `GPipe`, which reports do not import."""
    begun, cases, show = time.monotonic(), list[Case](), show or (lambda text: None)
    stages, machine = _stage_devices(devices), doctor()
    show(f"{machine}\n")

    def add(model: str, transport: str, checkpoint: str, found: tuple[bool, str]) -> None:
        cases.append(Case(model, transport, checkpoint, *found))
        show(str(cases[-1]))

    gpus = [device for device in stages if device.type == "cuda"]
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(bool(gpus) or before)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for transport, model, checkpoint in product(_transports(gpus), MODELS, CHECKPOINT_MODES):
                found = _compare(pipeline, MODELS[model], stages, transport, checkpoint)
                add(model, transport if gpus else "hand-over", checkpoint, found)
    finally:
        torch.use_deterministic_algorithms(before)
    torch.manual_seed(0)
    layers = nn.Sequential(_block(64, 4), nn.Dropout(0.1), nn.LayerNorm(64))
    add(
        "fused kernels",
        "",
        "always",
        check_fused(pipeline, layers, torch.randn(BATCH, 64, 64), [*gpus, *stages][0]),
    )
    checkup = Checkup(machine, tuple(map(str, stages)), tuple(cases), time.monotonic() - begun)
    show(f"\n{checkup.headline}")
    return checkup


def check_fused(
    pipeline: Pipeline, layers: nn.Sequential, x: Tensor, device: torch.device
) -> tuple[bool, str]:
    """Trains one stage with and without fused kernels, and compares both with the stage in float64.

    Args:
        pipeline: the class `GPipe`.
        layers: the layers of the stage, on the CPU, in float32; they are copied. Fused kernels should
            replace some of their operators.
        x: a mini-batch, on the CPU.
        device: the device of the stage.

    Returns:
        Whether fused kernels are right and used where they should be, and the result in words.
    """
    if reason := why_unfused(device):
        return True, f"skipped: {reason}"

    def trained(dtype: torch.dtype, fuse: bool) -> tuple[Any, dict[str, Tensor]]:
        own = copy.deepcopy(layers).to(dtype)
        model = pipeline(own, [len(own)], devices=[device], chunks=2, checkpoint="always", fuse=fuse)
        inputs = Inputs.of((x.to(device, dtype).requires_grad_(),), {})
        for _ in range(STEPS_ON_GPUS):
            torch.manual_seed(0)
            found = run_step(model, model, inputs, _weighted_sum)
        return model, {name: tensor for name, tensor in found.items() if name != "loss"}

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, found = trained(x.dtype, True)
            (_, plain), (_, exact) = trained(x.dtype, False), trained(torch.float64, False)
    except Exception as error:
        return False, f"FAILED: {failure(error)[:MAX_MESSAGE_LENGTH]}"
    if left_out.names():
        return False, f"WRONG, or not compiled or loaded: {', '.join(left_out.names())}"
    replaced = sum(len(each) for _, _, each in replaced_by_graph(model))
    if not replaced:
        return False, "NOT USED: no operators of the stage were replaced"
    worst = max(
        error_ratio(found[name], plain[name], exact[name], factor=MAX_RATIO, roundings=MAX_ROUNDINGS)
        for name in found
    )
    text = f"the largest error is {worst:.2g} times the error allowed ({replaced} replacements)"
    return worst <= 1, text if worst <= 1 else f"WRONG: {text}"


def _weighted_sum(output: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, output.numel(), device=output.device)
    return (output * weights.view_as(output).to(output.dtype)).sum()


def _stage_devices(devices: Iterable[Device] | None) -> list[torch.device]:
    if devices is not None:
        listed = _devices.parse_devices(devices)
        return _devices.checked_devices(listed, max(NUM_STAGES, len(listed)))
    visible = _devices.default_devices() or [torch.device("cpu")]
    return list(islice(cycle(visible), NUM_STAGES))


def _transports(gpus: Sequence[torch.device]) -> list[str]:
    """Returns the transports that these devices support; the machine's part says which have peer access."""
    if not gpus:
        return ["auto"]
    has_peers = all(torch.cuda.can_device_access_peer(a, b) for a, b in permutations({*gpus}, 2))
    return [transport for transport in TRANSPORTS if has_peers or transport != "peer"]


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
        return False, f"FAILED: {failure(error)[:MAX_MESSAGE_LENGTH]}"
    report = min(reports, key=bool)
    if report:
        return True, f"equal, {len(report.rows)} tensors"
    worst = max(report.rows, key=lambda row: row.relative)
    unequal = sum(not row.equal for row in report.rows)
    return False, (
        f"{unequal} of {len(report.rows)} tensors DIFFER, {worst.name} by {worst.difference:.3g} "
        f"({worst.relative:.3g} of its largest element)"
    )


def _block(width: int, heads: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)


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


def _convolutions() -> tuple[nn.Sequential, Tensor]:
    # No pooling layer, since its backward is not deterministic on GPUs.
    first = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
    second = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(8 * 4 * 4, 5)), torch.randn(BATCH, 3, 8, 8)


def _gpt() -> tuple[nn.Sequential, Tensor]:
    layers = nn.Embedding(32, 16), _block(16, 2), nn.Dropout(0.1), _block(16, 2), nn.Linear(16, 32)
    return nn.Sequential(*layers), torch.randint(32, (BATCH, 6))


def _python_and_skip() -> tuple[nn.Sequential, Tensor]:
    layers = nn.Linear(16, 16), _Down(), _Branch(), nn.GELU(), nn.Dropout(0.2), _Up(), nn.Linear(16, 4)
    return nn.Sequential(*layers), torch.randn(BATCH, 16)


MODELS: dict[str, Callable[[], tuple[nn.Sequential, Tensor]]] = {
    "GPT with dropout": _gpt,
    "convolutions, batch norm": _convolutions,
    "Python, skip connection": _python_and_skip,
}
