"""The public API as a table of names and signatures, which every change of the API must update."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest
from torch import nn

from gpipe_fast import GPipe
from tests.programs import ROOT

API = """
gpipe_fast
  class GPipe(module: nn.Sequential, balance: Iterable[int] | None = None, *others: NoReturn,
      devices: Iterable[Device] | Device | None = None, chunks: int | Literal['auto'] = 1,
      batch_dim: int | Iterable[int] = 0, checkpoint: CheckpointChoice = 'except_last',
      memory: MemoryLimit = None, deferred_batch_norm: bool = False,
      grad_dtype: torch.dtype | None = None, backend: str = 'auto', capture: bool = True,
      transport: str = 'auto', fuse: bool | None = None, schedule: ScheduleChoice = 'gpipe',
      mesh: Mesh | None = None, timeout: float = 60.0) -> None
    append(self, module: object) -> NoReturn
    balance: property, may be set
    batch_dim: property, may be set
    capture: property, may be set
    checkpoint: property, may be set
    chunks: property, may be set
    cpu(self) -> Self
    cuda(self, device: int | torch.device | None = None) -> Self
    devices: property, may be set
    evaluate(self, *args: Any, target: Any = None, loss_fn: Callable[..., Any],
        normalizer: Normalizer = None, losses: list[Tensor] | None = None,
        return_outputs: bool = False, **kwargs: Any) -> Any
    explain(self, *args: Any, device: Device | None = None, **kwargs: Any) -> Explanation
    extend(self, sequential: object) -> NoReturn
    extra_repr(self) -> str
    forward(self, *args: Any, **kwargs: Any) -> Any
    from_model(model: nn.Module, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None, *, blocks: Blocks | None = None,
        balance: Iterable[int] | None = None, devices: Iterable[Device] | Device | None = None,
        chunks: int | Literal['auto'] = 1, checkpoint: CheckpointChoice = 'except_last',
        memory: MemoryLimit = None, loss: str = 'exact', grad_dtype: torch.dtype | None = None,
        backend: str = 'auto', capture: bool = True, transport: str = 'auto',
        fuse: bool | None = None, schedule: ScheduleChoice = 'gpipe', mesh: Mesh | None = None,
        timeout: float = 60.0) -> Any
    fuse: property, may be set
    insert(self, index: object, module: object) -> NoReturn
    load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True,
        assign: bool = False) -> Any
    load_weights(self, source: Source, *, strict: bool = True,
        init: Initialize | None = None) -> Any
    memory(self, *args: Any, target: Any = None, loss_fn: Callable[..., Any] | None = None,
        normalizer: Any = None, optimizer: OptimizerChoice = None, measure: bool = False,
        device: Device | None = None, **kwargs: Any) -> MemoryReport
    memory_limit: property, may be set
    partitions: property
    pop(self, key: object = -1) -> NoReturn
    prepare(self, *args: Any, also: Sequence[Any] = (), **kwargs: Any) -> None
    recording(self) -> AbstractContextManager[Recording]
    report(self, *args: Any, target: Any = None, loss_fn: Callable[..., Any] | None = None,
        normalizer: Any = None, check: bool = False, **kwargs: Any) -> Report
    schedule: property, may be set
    state_dict(self, *args: Any, prefix: str = '', **kwargs: Any) -> Any
    step(self, *args: Any, target: Any = None, loss_fn: Callable[..., Any],
        normalizer: Normalizer = None, losses: list[Tensor] | None = None,
        return_outputs: bool = False, optimizer: Optimizer | None = None,
        scaler: GradScaler | None = None, max_norm: float | None = None,
        optimizer_in: Literal['end', 'drain'] = 'end', **kwargs: Any) -> Any
    stream(self, batches: Iterable[Any], *, depth: int | None = None) -> Iterator[Any]
    threads_per_stage: property, may be set
    to(self, *args: Any, **kwargs: Any) -> Self
  build_info(...)
  built_with_cuda(...)
  doctor(model: GPipe | None = None) -> str
  is_checkpointing() -> bool
  is_recomputing() -> bool
  keyed_rng(module: nn.Sequential, key: int | None = None) -> Iterator[KeyedRandomMode]
  replicate(value: object) -> Any
  simulate(schedule: ScheduleChoice = 'gpipe', num_stages: int = 1, num_microbatches: int = 1,
      *, forward: PerStage = 1.0, backward: PerStage = 2.0, weights: PerStage | None = None,
      recompute: PerStage | None = None, checkpoint: str = 'except_last', transfer: PerStage = 0.0,
      latency: float = 0.0, bandwidth: float = inf, boundary_bytes: PerStage = 0.0,
      activation_bytes: PerStage = 0.0, num_devices: int = 1) -> Simulation
  tune(model: Any, *args: Any, target: Any = None, loss_fn: Callable[..., Any] | None = None,
      normalizer: Any = None, seconds: float = 60.0, progress: bool | None = None,
      memory: MemoryLimit = None, **kwargs: Any) -> Tuning | MemoryChoices
  verify(model: Any, *args: Any, loss_fn: Callable[[Any], Tensor] | None = None,
      chunks: int | Literal['auto'] | None = None, all: bool = False, **kwargs: Any) -> Report
gpipe_fast.skip
  class Namespace() -> None
  class pop(name: str) -> None
  skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[nn.Module]],
      type[Skippable]]
  class stash(name: str, tensor: Tensor | None) -> None
  verify_skippables(module: nn.Module) -> None
gpipe_fast.balance
  class LayerProfile(index: int, name: str, kind: str, forward_seconds: float,
      backward_seconds: float, flops: int, parameter_bytes: int, activation_bytes: int,
      boundary_bytes: int, threads: int = 0) -> None
  balance_by_cost(partitions: int, costs: Iterable[float],
      objective: Literal['max', 'variance'] = 'max') -> list[int]
  balance_by_size(partitions: int, module: nn.Sequential | LayerSequence, input: Any, *,
      chunks: int = 1, param_scale: float = 2.0, device: Device | None = None) -> list[int]
  balance_by_time(partitions: int, module: nn.Sequential | LayerSequence, sample: Any, *,
      timeout: float = 1.0, device: Device | None = None) -> list[int]
  profile_layers(module: nn.Sequential | LayerSequence, sample: Any, *,
      device: Device | None = None, timeout: float | None = 1.0, chunks: int = 1,
      threads: int | None = None, progress: bool | None = None) -> list[LayerProfile]
  table(profiles: Iterable[LayerProfile]) -> str
gpipe_fast.profile
  LayerProfile, as in gpipe_fast.balance
  profile_layers, as in gpipe_fast.balance
  table, as in gpipe_fast.balance
gpipe_fast.picture
  draw(recording: Recording, path: str | os.PathLike[str] | None = None, *,
      title: str = '') -> str
gpipe_fast.recording
  class Advice(what: str, settings: dict[str, Any], predicted: float,
      measured: float | None = None) -> None
    code: property
  class Event(action: Action, is_wait: bool, begin: float, end: float, run: int = 0,
      boundary_bytes: int = 0, saved_bytes: int = 0, scratch_bytes: int = 0,
      transit: float = 0.0) -> None
  class Gap(rank: int, begin: float, end: float, seconds: Mapping[str, float]) -> None
  class Growth(num_microbatches: int, activations: int, paper: int)
  class MemoryChoice(settings: Mapping[str, Any], seconds: float,
      bytes: tuple[int, ...]) -> None
    code: property
  class MemoryChoices(choices: tuple[MemoryChoice, ...]) -> None
    code: property
    to_dict(self) -> dict[str, Any]
  class MemoryReport(stages: tuple[StageBytes | None, ...], optimizer: tuple[int, ...],
      devices: tuple[str, ...], measured: tuple[StageMemory, ...] = (),
      unknown: tuple[str, ...] = ()) -> None
    to_dict(self) -> dict[str, Any]
    totals: property
  class Phase(schedule: Schedule, events: Mapping[Action, Event], waits: Sequence[Event])
    replay(self) -> Simulation
    seconds(self) -> dict[Action, float]
    transit(self, send: Action) -> float
    window: property
  class Recording() -> None
    bubble(self) -> float
    critical_path(self) -> float
    has_backward: property
    latest: property
    phases(self) -> list[Schedule]
    report(self) -> Report
    seconds(self) -> dict[Action, float]
    span(self) -> float
  class Report(phases: tuple[Phase, ...], step: float, between: float,
      stages: tuple[StageTimes, ...], recompute: float, blame: dict[str, float],
      critical_path: tuple[Action, ...], path_seconds: float, busy_bound: float,
      gaps: tuple[Gap, ...], memory: tuple[StageMemory, ...] = (), advice: tuple[Advice, ...] = (),
      growth: tuple[Growth, ...] = (), clock_error: float = 0.0) -> None
    bubble: property
    bubble_of_equal_stages: property
    headline(self) -> str
    num_microbatches: property
    num_ranks: property
    of(phases: Sequence[Phase], sizes: Sequence[StageSizes] = (),
        clock_error: float = 0.0) -> Report
    save(self, path: str | os.PathLike[str], *, title: str = '') -> None
    tables(self) -> list[Table]
    timeline(self) -> Timeline
    to_dict(self) -> dict[str, Any]
  class StageBytes(parameters: int, buffers: int, gradients: int, boundary: int, saved: int,
      intermediates: int, under_way: int, waiting: int)
    total: property
  class StageMemory(parameters: int, gradients: int, boundary: int, saved: int, scratch: int)
    activations: property
  class StageTimes(busy: float, copying: float, waiting: float, idle: float)
  class Trial(settings: Mapping[str, Any], predicted: float | None, measured: float | None,
      failure: str = '') -> None
  class Tuning(trials: tuple[Trial, ...], settings: Mapping[str, Any], before: float,
      after: float, is_complete: bool) -> None
    code: property
    to_dict(self) -> dict[str, Any]
gpipe_fast.explanation
  class Explanation(device: str, settings: str, notes: tuple[str, ...],
      stages: tuple[StageExplanation, ...]) -> None
    to_dict(self) -> dict[str, Any]
  class FusedGroup(operators: tuple[str, ...], kernels: tuple[str, ...],
      layers: tuple[tuple[int, ...], ...], saved_bytes: int) -> None
  class LeftGroup(operator: str, count: int, layers: tuple[int, ...], bytes: int,
      reason: str) -> None
  class ProgramExplanation(direction: str, microbatches: int, bytes_before: int,
      bytes_after: int, launches_before: int, launches_after: int, fused: tuple[FusedGroup, ...],
      left: tuple[LeftGroup, ...]) -> None
  class StageExplanation(index: int, layers: tuple[str, ...], first_layer: int, device: str,
      note: str, programs: tuple[ProgramExplanation, ...]) -> None
gpipe_fast.schedule
  class Action(stage: int, kind: Kind, microbatch: int)
    parse(text: str) -> Action
  BACKWARD: tuple
  enum Kind: F, R, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, U
  SCHEDULES: dict
  class Schedule(ranks: tuple[tuple[Action, ...], ...], num_microbatches: int,
      slots: int) -> None
    backward_part(self) -> Schedule
    critical_path(self, seconds: Callable[[Action], float] = tick) -> float
    csv(self) -> str
    defers_weights: property
    forward_part(self) -> Schedule
    from_csv(text: str) -> Schedule
    of(ranks: Iterable[Iterable[Action]], num_microbatches: int | None = None, *,
        slots: int | None = None, recomputed: Recomputed | None = None) -> Schedule
    order(self) -> tuple[Action, ...]
    order_around(self, stage: int, early: Callable[[Action], bool]) -> tuple[Action, ...]
    parse(text: str, *, slots: int | None = None) -> Schedule
    slots_needed(self, seconds: Callable[[Action], float] = tick) -> int
    times(self, seconds: Callable[[Action], float] = tick,
        transit: Callable[[Action], float] = _no_time) -> dict[Action, float]
    waits(self) -> dict[Action, Action]
  ScheduleChoice: UnionType
  class Simulation(schedule: Schedule, begins: dict[Action, float], ends: dict[Action, float],
      peak_bytes: tuple[float, ...] = ()) -> None
    bubble: property
    of(schedule: Schedule, seconds: Callable[[Action], float] = tick,
        transit: Callable[[Action], float] | None = None) -> Simulation
    to_dict(self) -> dict[str, Any]
  TRANSFERS: tuple
  bubble(num_stages: int, num_microbatches: int) -> float
  fill_drain(num_stages: int, num_microbatches: int, *, slots: int | None = None,
      backward: bool = True, recomputed: Recomputed | None = None) -> Schedule
  interleaved(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None,
      recomputed: Recomputed | None = None) -> Schedule
  one_f_one_b(num_stages: int, num_microbatches: int, *,
      recomputed: Recomputed | None = None) -> Schedule
  schedule_for(choice: ScheduleChoice, num_stages: int, num_microbatches: int, *,
      num_devices: int = 1, recomputed: Recomputed | None = None) -> Schedule
  simulate, as in gpipe_fast
  zb_h1(num_stages: int, num_microbatches: int, *,
      recomputed: Recomputed | None = None) -> Schedule
gpipe_fast.verify
  class Report(rows: tuple[Row, ...], num_microbatches: int, show_all: bool = False) -> None
    headline: property
    ok: property
    table(self, *, all: bool | None = None) -> str
  class Row(name: str, equal: bool, difference: float = 0.0, relative: float = 0.0,
      note: str = '') -> None
  class SwitchReports(all_on: Report, by_switch: Mapping[str, Report]) -> None
    causes: property
  find_switch(model: GPipe, *args: Any, loss_fn: Callable[[Any], Tensor] | None = None,
      also: Sequence[Any] = (), **kwargs: Any) -> SwitchReports
  verify, as in gpipe_fast
gpipe_fast.switches
  disabled(*names: str) -> Iterator[None]
gpipe_fast.doctor
  class Case(model: str, transport: str, checkpoint: str, ok: bool, result: str) -> None
  class Checkup(machine: str, stages: tuple[str, ...], cases: tuple[Case, ...],
      fused: FusedCheck, left_out: tuple[str, ...], seconds: float) -> None
    headline: property
    ok: property
  class FusedCheck(ok: bool, result: str) -> None
  check(devices: Iterable[Device] | None = None,
      show: Callable[[str], object] | None = None) -> Checkup
  doctor, as in gpipe_fast
gpipe_fast.kernels
  cross_entropy(logits: Tensor, target: Tensor, *, ignore_index: int = -100,
      label_smoothing: float = 0.0, reduction: str = 'mean', inplace: bool = False) -> Tensor
  linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *,
      ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = 'mean',
      chunk_rows: int | None = None) -> Tensor
"""

MODULES = [
    "gpipe_fast",
    "gpipe_fast.skip",
    "gpipe_fast.balance",
    "gpipe_fast.profile",
    "gpipe_fast.picture",
    "gpipe_fast.recording",
    "gpipe_fast.explanation",
    "gpipe_fast.schedule",
    "gpipe_fast.verify",
    "gpipe_fast.switches",
    "gpipe_fast.doctor",
    "gpipe_fast.kernels",
]


def signature(function: object) -> str:
    """Returns a signature as in the source, without the quotes of unevaluated annotations."""
    try:
        text = str(inspect.signature(function))  # type: ignore[arg-type]
    except ValueError:  # the extension's functions have no signature
        return "(...)"
    text = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", text)
    text = re.sub(r"<function (\w+) at 0x\w+>", r"\1", text)
    return re.sub(r"""(: |-> )(['"])(.*?)\2""", r"\1\3", text)


def members(cls: type) -> Iterator[str]:
    """Yields public methods and properties, including those inherited from classes of this package."""
    own = [base for base in cls.__mro__ if base.__module__.startswith("gpipe_fast")]
    for name in sorted({name for base in own for name in vars(base) if not name.startswith("_")}):
        member = inspect.getattr_static(cls, name)
        if isinstance(member, property):
            yield f"{name}: property{', may be set' if member.fset else ''}"
        elif isinstance(member, (classmethod, staticmethod, FunctionType)):
            yield f"{name}{signature(getattr(cls, name))}"


def describe(name: str, value: object) -> Iterator[str]:
    if isinstance(value, enum.EnumMeta):
        yield f"enum {name}: {', '.join(value.__members__)}"
    elif isinstance(value, type):
        yield f"class {name}{signature(value)}"
        yield from (f"  {line}" for line in members(value))
    elif callable(value):
        yield f"{name}{signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def wrapped(line: str) -> list[str]:
    """Wraps a line between parameters to at most 100 characters, and indents continuation lines further."""
    indent = line[: len(line) - len(line.lstrip())]
    bracketed = r"\[(?:[^\[\]]|\[[^\]]*\])*\]"
    unbroken = re.sub(bracketed, lambda found: found[0].replace(" ", "\0"), line.lstrip())
    unbroken = re.sub(r"(?<!,) ", "\0", unbroken)
    parts = textwrap.wrap(unbroken, 96 - len(indent), break_long_words=False, break_on_hyphens=False)
    text = ("\n    " + indent).join(parts).replace("\0", " ")
    return (indent + text).splitlines()


def public_api() -> list[str]:
    lines, seen = [], {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        lines.append(module_name)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if id(value) in seen:
                lines.append(f"  {name}, as in {seen[id(value)]}")
                continue
            seen[id(value)] = module_name
            for line in describe(name, value):
                lines += wrapped(f"  {line}")
    return lines


def test_the_public_api_equals_the_table() -> None:
    assert public_api() == API.strip().splitlines()


def test_a_pipeline_has_only_the_listed_public_attributes() -> None:
    """Properties and methods are listed in the table above."""
    own = vars(GPipe(nn.Sequential(nn.ReLU()), [1])).keys() - vars(nn.Module()).keys()
    names = {"backend", "grad_dtype", "transport"}
    assert {name for name in own if not name.startswith("_")} == names


@pytest.mark.smoke
def test_importing_a_module_does_not_shadow_the_function_of_its_name(tmp_path: Path) -> None:
    """Runs in a new process, where nothing has been imported yet, and in a folder that is not the tree's."""
    program = """
import gpipe_fast.doctor
import gpipe_fast.verify
assert gpipe_fast.doctor().startswith("versions"), gpipe_fast.doctor
assert callable(gpipe_fast.verify), gpipe_fast.verify
from gpipe_fast.doctor import doctor
from gpipe_fast.verify import verify
assert (doctor, verify) == (gpipe_fast.doctor, gpipe_fast.verify)
gpipe_fast.balance, gpipe_fast.picture.draw, gpipe_fast.profile.table, gpipe_fast.recording, gpipe_fast.skip
"""
    if importlib.util.find_spec("triton"):
        program += "import gpipe_fast.kernels"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
