"""What a step needs on each stage and device, before the first step; and settings that fit into a memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpipe_fast.layers.quantized import stored_tensors
from gpipe_fast.reports.advice import as_code
from gpipe_fast.reports.tables import Printed, Table, plain, size
from gpipe_fast.runtime.stage_memory import StageBytes, block_bytes

OptimizerChoice = Optimizer | Callable[[list[torch.nn.Parameter]], Optimizer] | None


@dataclass(frozen=True, repr=False)
class MemoryReport(Printed):
    """What a step needs, in bytes. ``print`` shows tables.

    On a GPU, a tensor counts as what PyTorch's allocator takes for it, a multiple of 512 bytes. If the GPU is
    there, what PyTorch's operators allocate and free again counts, too. What libraries such as cuBLAS keep
    for later does not count, nor does what the allocator keeps.

    Attributes:
        stages: what each stage needs; None if that is not known, because layers run in Python.
        optimizer: the state of the optimizer for the parameters of each stage; 0 if no optimizer was passed.
        devices: the device of each stage.
        unknown: for each stage, the reason why its bytes are not known, or an empty text.
    """

    stages: tuple[StageBytes | None, ...]
    optimizer: tuple[int, ...]
    devices: tuple[str, ...]
    unknown: tuple[str, ...] = ()

    _properties = ("totals",)

    @property
    def totals(self) -> dict[str, int | None]:
        """The bytes of each device: the sum of its stages, though these may need most at different times."""
        found: dict[str, int | None] = {}
        for own, state, device in zip(self.stages, self.optimizer, self.devices, strict=True):
            before = found.get(device, 0)
            found[device] = None if own is None or before is None else before + own.total + state
        return found

    def _parts(self) -> Iterator[str | Table]:
        """Yields tables, and a line for each reason why bytes are not known, with the stages it concerns."""
        headers = ["stage", "device", *StageBytes._fields, "optimizer", "total"]
        rows = []
        for stage, (own, state) in enumerate(zip(self.stages, self.optimizer, strict=True)):
            place = [str(stage), self.devices[stage]]
            if own is None:
                rows.append([*place, "unknown", *[""] * (len(headers) - 3)])
            else:
                rows.append([*place, *map(size, own), size(state), size(own.total + state)])
        yield Table("", headers, rows, ["device"])
        if len(self.stages) > 1:
            totals = [[device, "?" if own is None else size(own)] for device, own in self.totals.items()]
            yield Table("", ["device", "total"], totals)
        found: dict[str, list[str]] = {}
        for stage, reason in enumerate(self.unknown):
            if reason:
                found.setdefault(reason, []).append(str(stage))
        for reason, stages in found.items():
            yield f"stage{'s' * (len(stages) > 1)} {', '.join(stages)}: {reason}"

    __repr__ = Printed.__str__


@dataclass(frozen=True)
class MemoryChoice:
    """Settings that fit.

    Attributes:
        settings: the balance, the number of micro-batches and the bytes.
        seconds: the simulated time of a step.
        bytes: what each stage needs, as far as is known before its programs are made.
    """

    settings: Mapping[str, Any]
    seconds: float
    bytes: tuple[int, ...]

    @property
    def code(self) -> str:
        """The settings as a line of Python."""
        return as_code(self.settings)


@dataclass(frozen=True)
class MemoryChoices(Printed):
    """The fastest settings within a number of bytes, and up to two runners-up. ``print`` shows them as code.

    Attributes:
        choices: the settings, the fastest first.
    """

    choices: tuple[MemoryChoice, ...]

    @property
    def code(self) -> str:
        """The fastest settings as a line of Python."""
        return self.choices[0].code

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as numbers, strings, lists and dicts, for JSON. Times are in seconds."""
        return {"choices": [plain(each) | {"code": each.code} for each in self.choices]}

    def _parts(self) -> list[str | Table]:
        rows = [
            [each.code, f"{each.seconds * 1e3:.1f}", " + ".join(map(size, each.bytes))]
            for each in self.choices
        ]
        return [Table("", ["settings", "predicted ms", "bytes of stages"], rows)]


def optimizer_bytes(optimizer: OptimizerChoice, parameters: Iterable[Tensor], device: torch.device) -> int:
    """Returns the bytes of an optimizer's state on a device, after a step on tensors without memory.

    Args:
        optimizer: an optimizer, whose class and defaults are used, or a function that makes one of a list of
            parameters, such as ``torch.optim.AdamW``; None for nothing.
        parameters: the parameters.
        device: the device on which they count. On a GPU, counters of steps that stay on the host do not.

    Raises:
        TypeError: ``optimizer`` is none of these.
    """
    stand_ins = [
        torch.nn.Parameter(torch.empty_like(p, device="meta")) for p in parameters if p.requires_grad
    ]
    if optimizer is None or not stand_ins:
        return 0
    if isinstance(optimizer, Optimizer):
        # Tensors without memory have no fused kernels, and some defaults are no arguments.
        known = inspect.signature(type(optimizer)).parameters.keys() - {"fused"}
        made = type(optimizer)(stand_ins, **{n: v for n, v in optimizer.defaults.items() if n in known})
    elif callable(optimizer):
        made = optimizer(stand_ins)
    else:
        raise TypeError(
            f"optimizer must be an optimizer or a function that makes one, got {type(optimizer).__name__}; "
            "pass torch.optim.AdamW, or lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9)"
        )
    for parameter in stand_ins:
        parameter.grad = torch.empty_like(parameter)
    made.step()
    states = (value for state in made.state.values() for value in state.values())
    counts_host = device.type == "cpu" or (
        isinstance(optimizer, Optimizer) and optimizer.defaults.get("fused")
    )
    return sum(
        block_bytes(part.nbytes, device)
        for value in states
        if isinstance(value, Tensor) and (value.is_meta or counts_host)
        for part in stored_tensors(value)  # those of few bits have tensors inside
    )
