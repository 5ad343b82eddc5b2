"""The settings of a pipeline, each of which is checked in one place."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Generic, Literal, TypeVar, cast, overload

import torch

from gpipe_fast import switches
from gpipe_fast._extension import Capture
from gpipe_fast.layers.structure import BatchDim
from gpipe_fast.lower.checkpoint import (
    CHECKPOINT_MODES,
    CheckpointChoice,
    CheckpointSetting,
    checkpoint_policy,
)
from gpipe_fast.schedule import SCHEDULES, Schedule, ScheduleChoice

# Bytes as a number or a text, or one of these for each device; None for no limit.
MemoryLimit = int | float | str | Sequence[int | float | str] | None
BACKENDS = ("auto", "aten", "eager")
TRANSPORTS = ("auto", "peer", "pinned")
# When mini-batches on GPUs are captured as CUDA graphs.
CAPTURES = {False: Capture.NEVER, "auto": Capture.WHERE_IT_PAYS, True: Capture.ALWAYS}
_UNITS = {"B": 1} | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class Settings:
    """What calls of a pipeline read, besides its layers and where they are; see `GPipe` for each.

    Raises:
        TypeError: a value has a wrong type.
        ValueError: a value is invalid.
    """

    chunks: int | Literal["auto"] = 1
    checkpoint: CheckpointSetting = "except_last"
    batch_dim: BatchDim = 0
    memory_limit: MemoryLimit = None
    deferred_batch_norm: bool = False
    backend: str = "auto"
    grad_dtype: torch.dtype | None = None
    transport: str = "auto"
    schedule: ScheduleChoice = "gpipe"
    fuse: bool = True
    capture: bool | str = "auto"
    threads_per_stage: int | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(getattr(self, name)))

    def check_for(self, devices: Sequence[torch.device]) -> None:
        """Checks that a list with a value for each stage, or for each device, has as many of them.

        Args:
            devices: the device of each stage.

        Raises:
            ValueError: a list has another length.
        """
        if isinstance(self.checkpoint, tuple):
            checkpoint_policy(self.checkpoint, len(devices), True)
        self.limits(devices)

    def limits(self, devices: Sequence[torch.device]) -> dict[torch.device, int] | None:
        """Returns the bytes that training may take on each device; None if there is no limit."""
        return checked_memory(self.memory_limit, devices)


_Got = TypeVar("_Got")
_Given = TypeVar("_Given")


class Setting(Generic[_Got, _Given]):
    """An attribute of a model that is one of its settings, and may be set between calls.

    Args:
        runner: the name of the model's attribute that has ``settings`` and ``configure``.

    Raises:
        TypeError: On assignment, the value has a wrong type. The old value is kept.
        ValueError: On assignment, the value is invalid. The old value is kept.
    """

    def __init__(self, runner: str) -> None:
        self._runner = runner

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, model: None, owner: type) -> Setting[_Got, _Given]: ...

    @overload
    def __get__(self, model: object, owner: type) -> _Got: ...

    def __get__(self, model: Any, owner: type) -> Any:
        return self if model is None else getattr(getattr(model, self._runner).settings, self._name)

    def __set__(self, model: Any, value: _Given) -> None:
        getattr(model, self._runner).configure(**{self._name: value})


def _checked_chunks(chunks: int | str) -> int | Literal["auto"]:
    """Returns the number of micro-batches, or 'auto'. Converts strings, as torchgpipe does."""
    if chunks == "auto":
        return "auto"
    try:
        number = 0 if isinstance(chunks, bool) else int(chunks)
    except (TypeError, ValueError, OverflowError):
        number = 0
    if number <= 0 or (number != chunks and not isinstance(chunks, str)):
        raise ValueError(f"number of chunks must be positive integer or 'auto', got {chunks!r}")
    return number


def _checked_checkpoint(checkpoint: CheckpointChoice) -> CheckpointSetting:
    """Returns the checkpoint mode, the share of activations to save, or one of these for each stage."""
    given = checkpoint if isinstance(checkpoint, (list, tuple)) else [checkpoint]
    each = [_checked_mode(one) for one in given]
    if not each or None in each:
        raise ValueError(
            "checkpoint is not one of 'always', 'except_last', or 'never', nor 'except_attention', a number "
            f"from 0 to 1, or a list with one of these for each stage, got {checkpoint!r}"
        )
    found = tuple(cast(list[str | float], each))
    return found if given is checkpoint else found[0]


def _checked_capture(capture: bool | str) -> bool | str:
    """Returns whether graphs are captured: a truth value or 'auto'."""
    if capture not in (True, False, "auto"):
        raise ValueError(
            "capture is one of True, False, or 'auto' (only where the host's launches take about as long as "
            f"the device's work), got {capture!r}"
        )
    return capture if isinstance(capture, str) else bool(capture)


def checked_memory(memory: MemoryLimit, devices: Sequence[torch.device]) -> dict[torch.device, int] | None:
    """Returns the bytes of each device; None if there is no limit.

    Args:
        memory: a number of bytes, a text such as ``'20GiB'``, or one of these for each device.
        devices: the device of each stage.

    Raises:
        ValueError: ``memory`` is none of these, or not one for each device.
    """
    if memory is None:
        return None
    distinct = list(dict.fromkeys(devices))
    each = list(memory) if isinstance(memory, (list, tuple)) else [memory] * len(distinct)
    if len(each) != len(distinct):
        raise ValueError(
            f"memory has {len(each)} values, but the stages are on {len(distinct)} devices, "
            f"{', '.join(map(str, distinct))}; pass one value for all, or one for each device"
        )
    return {device: _checked_bytes(value) for device, value in zip(distinct, each, strict=True)}


def _checked_bytes(value: Any) -> int:
    found = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?i?B)?\s*", value) if isinstance(value, str) else None
    number = found[1] if found else value
    try:
        size = 0 if isinstance(number, bool) else float(number) * _UNITS[(found and found[2]) or "B"]
    except (TypeError, ValueError, KeyError):
        size = 0
    if not 1 <= size < float("inf"):
        raise ValueError(
            f"memory must be a number of bytes or a text such as '20GiB' or '500MB', got {value!r}; offload "
            "to the host is not possible: what does not fit is recomputed"
        )
    return int(size)


def _checked_mode(value: Any) -> str | float | None:
    """Returns the mode or the share; None if it is neither."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value) if 0 <= float(value) <= 1 else None
    mode = str(value)
    return mode if mode in CHECKPOINT_MODES else None


def _checked_grad_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """Returns the dtype in which gradients are accumulated over micro-batches."""
    if dtype is not None and dtype is not torch.float32:
        raise ValueError(f"grad_dtype must be None or torch.float32, got {dtype!r}")
    return dtype


def switched_backend(backend: str) -> str:
    """Returns the backend, or 'eager' if capture is switched off.

    Raises:
        RuntimeError: the backend is 'aten', which allows no layer in Python.
    """
    if not switches.is_disabled("capture"):
        return backend
    if backend == "aten":
        raise RuntimeError(
            f"{switches.VARIABLE}=capture runs all layers in Python, and backend='aten' allows none; pass "
            "backend='auto' to GPipe, or unset the variable"
        )
    return "eager"


def _checked_schedule(schedule: ScheduleChoice) -> ScheduleChoice:
    """Returns the schedule of a step."""
    if isinstance(schedule, Schedule) or (callable(schedule) and not isinstance(schedule, type)):
        return schedule
    if not isinstance(schedule, str):
        raise TypeError(
            f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, a gpipe_fast.schedule.Schedule, or "
            f"a function of the numbers of stages and micro-batches that returns one, got {schedule!r}"
        )
    return _one_of("schedule", schedule, SCHEDULES)


def _one_of(argument: str, value: str, choices: Collection[str]) -> str:
    if value not in choices:
        raise ValueError(f"{argument} is not one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def _checked_threads_per_stage(threads: int | None) -> int | None:
    """Returns the number of intra-op threads of each stage."""
    if threads is not None and (type(threads) is not int or threads <= 0):
        raise ValueError(f"threads_per_stage must be a positive integer or None, got {threads!r}")
    return threads


def _checked_batch_dim(batch_dim: int | Iterable[int]) -> BatchDim:
    """Returns the batch dimension: one for all tensors, or a tuple with one for each tensor that is split."""
    try:
        return operator.index(batch_dim)  # type: ignore[arg-type]
    except TypeError:
        pass
    try:
        dims = tuple(operator.index(dim) for dim in batch_dim)  # type: ignore[union-attr]
    except TypeError:
        raise TypeError(
            "batch_dim must be an integer, or a tuple with one integer for each input tensor that is split "
            f"into micro-batches, got {batch_dim!r}"
        ) from None
    if not dims:
        raise ValueError("batch_dim is empty; pass one integer, or one for each input tensor that is split")
    return dims


def _checked_limit(memory: MemoryLimit) -> MemoryLimit:
    """Returns the limit; how many values there may be depends on the devices."""
    for each in memory if isinstance(memory, (list, tuple)) else [memory]:
        if each is not None:
            _checked_bytes(each)
    return memory


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "chunks": _checked_chunks,
    "checkpoint": _checked_checkpoint,
    "batch_dim": _checked_batch_dim,
    "memory_limit": _checked_limit,
    "deferred_batch_norm": bool,
    "backend": lambda backend: _one_of("backend", backend, BACKENDS),
    "grad_dtype": _checked_grad_dtype,
    "transport": lambda transport: _one_of("transport", transport, TRANSPORTS),
    "schedule": _checked_schedule,
    "fuse": lambda fuse: fuse is None or bool(fuse),
    "capture": _checked_capture,
    "threads_per_stage": _checked_threads_per_stage,
}
