"""A report: what there is to run on, and how a model runs there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations

import torch

from gpipe_fast._extension import ReplayReport, build_info
from gpipe_fast.gpipe import GPipe
from gpipe_fast.inspect.architectures import code_for
from gpipe_fast.layers.title import title
from gpipe_fast.runtime.edges import described


def doctor(model: GPipe | None = None) -> str:
    """Says what there is to run on, and how a model runs there; plain text, for people to read.

    Of the machine: versions of torch, CUDA and the driver, for which GPUs the extension was built, the
    devices and their memory, whether the extension has code for them, and which reach each other's
    memory. Of a model: where its stages are, which layers run in Python and why, how tensors get from stage
    to stage, and, once it was called, how many bytes lie there and what costs more than it has to.

    Args:
        model: may be left out.

    Raises:
        TypeError: ``model`` is no `GPipe`.
    """
    if model is not None and not isinstance(model, GPipe):
        raise TypeError(
            f"doctor reports on a GPipe, got {type(model).__name__}; wrap it, GPipe(nn.Sequential(...)),"
            " or leave the argument out for a report on the machine"
        )
    sections = [("versions", _versions()), ("devices", _devices())]
    if model is not None:
        sections += [
            ("stages", _stages(model)),
            ("layers in Python", _in_python(model)),
            ("transport", _transport(model)),
            ("captured", captured(model)),
        ]
        costs = model._planner.remarks.costs
        sections += [("costs more than it has to", costs)] if costs else []
    return "\n\n".join(_section(*section) for section in sections)


def captured(model: GPipe) -> list[str]:
    """Lines on what of a model's work is captured into CUDA graphs, one for each kind of call."""
    if all(device.type == "cpu" for device in model.devices):
        return []
    if not model.capture:
        return ["nothing: capture=False was asked for"]
    reports = model._pipeline.replays()
    lines = [_captured(report) for report in reports]
    if any(report.forward for report in reports):
        lines.append(
            f"all graphs share {sum(r.bytes for r in reports) / 2**20:.1f} MiB, so one mini-batch at a time"
            " is replayed from its forward to its backward"
        )
    return lines or ["not known before the first call"]


def _captured(report: ReplayReport) -> str:
    ran = f"{report.replays} mini-batches replayed, {report.as_they_are} run as they are"
    if report.obstacle:
        return f"not captured: {report.obstacle}; {ran}"
    if not report.forward:
        why = f" {report.setback}, and it is tried again later;" if report.setback else ""
        return f"not yet captured;{why} {ran}"
    what = "forward and backward" if report.backward else "forward"
    taken = f"{report.bytes / 2**20:.1f} MiB beside what others had taken"
    return f"{what}: {report.num_nodes} nodes, {taken}; {ran}"


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines or ["nothing"])])


def _versions() -> list[str]:
    built = build_info()
    cuda = "without CUDA" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    archs = "no GPU" if built["cuda"] == "none" else f"CUDA {built['cuda']}, GPUs {built['cuda_archs']}"
    return [
        f"torch {torch.__version__}, {cuda}{_driver()}",
        f"extension built for torch {built['torch']}, {archs}, by compiler {built['compiler']}",
    ]


def _driver() -> str:
    """What the driver is there for, where there is one."""
    if not torch.cuda.is_available():
        return ", no GPU found"
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)  # torch's own way to word its errors
    version = 0 if ask is None else ask()
    return f", driver for CUDA up to {version // 1000}.{version % 1000 // 10}" if version else ""


def _devices() -> list[str]:
    lines = [f"cpu: {os.cpu_count()} cores, {torch.get_num_threads()} intra-op threads"]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        lines.append(
            f"cuda:{index}: {found.name}, {found.total_memory / 2**30:.1f} GiB, "
            f"compute capability {found.major}.{found.minor}"
        )
        lines.append(f"cuda:{index}: {code_for((found.major, found.minor), build_info()['cuda_archs'])}")
    return lines + [_reach(a, b) for a, b in combinations(range(count), 2)]


def _reach(one: int, other: int) -> str:
    ways = torch.cuda.can_device_access_peer(one, other), torch.cuda.can_device_access_peer(other, one)
    if all(ways):
        return f"cuda:{one} and cuda:{other} reach each other's memory"
    if not any(ways):
        return f"cuda:{one} and cuda:{other} do not reach each other's memory"
    first, second = (one, other) if ways[0] else (other, one)
    return f"cuda:{first} reaches cuda:{second}'s memory, and not the other way round"


def _stages(model: GPipe) -> list[str]:
    lines, layers = [], list(model.named_children())
    begin = 0
    for index, (size, device) in enumerate(zip(model.balance, model.devices, strict=True)):
        names = ", ".join(title(name, layer) for name, layer in layers[begin : begin + size])
        lines.append(f"stage {index} ({device}): {names}")
        begin += size
    return lines


def _in_python(model: GPipe) -> list[str]:
    if model.backend == "eager":
        return ["all: backend='eager' was asked for"]
    found = model._planner.remarks.all
    return found or (["none"] if model._planner.latest else ["not known before the first call"])


def _transport(model: GPipe) -> list[str]:
    lines = described(model._edges, model._planner.latest)
    if lines and model._planner.latest is None:
        lines.append("how much lies there at once is known after the first call")
    return lines
