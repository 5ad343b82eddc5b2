"""A diagnostic report on the machine, and on how a model runs on it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from gpipe_fast._extension import GraphReport, build_info
from gpipe_fast.container import runner_of
from gpipe_fast.fuse import left_out
from gpipe_fast.fuse.availability import why_unfused
from gpipe_fast.layers.structure import layer_title
from gpipe_fast.reports.reporting import Reporting
from gpipe_fast.runtime.connections import describe_connections
from gpipe_fast.runtime.stage import Stage
from gpipe_fast.torch_private.environment import cuda_driver_version

if TYPE_CHECKING:
    from gpipe_fast.fuse.fuse import Replaced
    from gpipe_fast.gpipe import GPipe

# A compute capability: 9.0 is (9, 0).
Capability = tuple[int, int]


def doctor(model: GPipe | None = None) -> str:
    """Returns a report on the machine, and on how a model runs on it, as plain text for people to read.

    The machine's part lists the versions of torch, CUDA and the driver, the GPU architectures of the
    extension, the devices with their memory, and which GPUs have peer access. The model's part lists the
    devices of its stages, the layers that run in Python with the reason, and the transport between stages;
    after the first call also the sizes of boundary tensors, captured CUDA graphs, fused kernels,
    and avoidable costs. The line on plans says how much memory they keep, and how many were evicted.

    Args:
        model: by default, the report has only the machine's part.

    Raises:
        TypeError: ``model`` is not a `GPipe`.
    """
    if model is not None and not isinstance(model, Reporting):
        raise TypeError(
            f"doctor reports on a GPipe, got {type(model).__name__}; wrap it, GPipe(nn.Sequential(...)), "
            "or leave the argument out for a report on the machine"
        )
    return format_sections(sections(model))


def sections(model: GPipe | None = None) -> list[tuple[str, list[str]]]:
    """Returns the titles and lines of the report."""
    found = [("versions", _versions()), ("devices", _devices())]
    if model is not None:
        found += [
            ("stages", _stages(model)),
            ("Python layers", _in_python(model)),
            ("transport", _transport(model)),
            ("plans", _plans(model)),
            ("CUDA graphs", graph_lines(model)),
        ]
        fused, costs = fused_lines(model), runner_of(model).planner.module_warnings.costs
        found += [("fused kernels", fused)] if fused else []
        found += [("avoidable costs", costs)] if costs else []
    return found


def format_sections(found: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Returns a report as text."""
    return "\n\n".join(
        "\n".join([title, *(f"  {line}" for line in lines or ["nothing"])]) for title, lines in found
    )


def graph_lines(model: GPipe) -> list[str]:
    """Returns report lines on a model's captured CUDA graphs, one for each kind of call."""
    if all(device.type == "cpu" for device in model.devices):
        return []
    runner = runner_of(model)
    if runner.processes.is_mesh:
        return ["nothing, because of the mesh"]
    if model.memory_limit is not None:
        return ["nothing, because graphs keep memory, which memory= limits"]
    if not model.capture:
        return ["nothing, because capture=False"]
    reports = runner.pipeline.graph_reports()
    lines = [_graph_line(report) for report in reports]
    if any(report.forward for report in reports):
        lines.append(
            f"all graphs share {sum(r.bytes for r in reports) / 2**20:.1f} MiB; a mini-batch that starts"
            " before the backward of another one has ended runs uncaptured"
        )
    return lines or ["unknown until the first call"]


def _graph_line(report: GraphReport) -> str:
    ran = f"{report.replays} mini-batches replayed, {report.uncaptured} run uncaptured"
    if report.obstacle:
        return f"not captured: {report.obstacle}; {ran}"
    if not report.forward:
        why = f" {report.postponed}, and capture is tried again later;" if report.postponed else ""
        return f"not yet captured;{why} {ran}"
    what = "forward and backward" if report.backward else "forward"
    memory_text = f"{report.bytes / 2**20:.1f} MiB in addition to earlier graphs"
    return f"{what}: {report.num_nodes} nodes, {memory_text}; {ran}"


def _versions() -> list[str]:
    built = build_info()
    cuda = "without CUDA" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    archs = "without CUDA" if built["cuda"] == "none" else f"CUDA {built['cuda']}, GPUs {built['cuda_archs']}"
    return [
        f"torch {torch.__version__}, {cuda}{_driver()}",
        f"extension built for torch {built['torch']}, {archs}, by compiler {built['compiler']}",
    ]


def _driver() -> str:
    """Returns the newest CUDA version that the driver supports, as a suffix for the line on versions."""
    if not torch.cuda.is_available():
        return ", no GPU found"
    version = cuda_driver_version()
    return f", driver supports CUDA up to {version // 1000}.{version % 1000 // 10}" if version else ""


def _devices() -> list[str]:
    lines = [f"cpu: {os.cpu_count()} cores, {torch.get_num_threads()} intra-op threads"]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        lines.append(
            f"cuda:{index}: {found.name}, {found.total_memory / 2**30:.1f} GiB, "
            f"compute capability {found.major}.{found.minor}"
        )
        lines.append(f"cuda:{index}: {describe_code((found.major, found.minor), build_info()['cuda_archs'])}")
    return lines + [_peer_access(a, b) for a, b in combinations(range(count), 2)]


def _peer_access(one: int, other: int) -> str:
    has_access = torch.cuda.can_device_access_peer(one, other), torch.cuda.can_device_access_peer(other, one)
    if all(has_access):
        return f"cuda:{one} and cuda:{other} have peer access to each other"
    if not any(has_access):
        return f"cuda:{one} and cuda:{other} have no peer access to each other"
    first, second = (one, other) if has_access[0] else (other, one)
    return f"cuda:{first} has peer access to cuda:{second}, but not the other way round"


def _stages(model: GPipe) -> list[str]:
    lines, layers = [], list(model.named_children())
    begin = 0
    for index, (size, device) in enumerate(zip(model.balance, model.devices, strict=True)):
        names = ", ".join(layer_title(name, layer) for name, layer in layers[begin : begin + size])
        lines.append(f"stage {index} ({device}): {names}")
        begin += size
    return lines


def _in_python(model: GPipe) -> list[str]:
    if model.backend == "eager":
        return ["all, because backend='eager'"]
    planner = runner_of(model).planner
    found = list(map(str, planner.module_warnings.python_layers.values()))
    return found or (["none"] if planner.latest else ["unknown until the first call"])


def _plans(model: GPipe) -> list[str]:
    planner = runner_of(model).planner
    eviction, sizes = planner.eviction, (planner.eviction.num_bytes(), planner.compiler.template_bytes())
    plans, templates = (f"{number / 2**20:.1f} MiB" for number in sizes)
    limit = f"of at most {eviction.limit / 2**20:.1f} MiB"
    lines = [f"{len(eviction.plans())} kept, with programs and graphs of about {plans} {limit}"]
    lines += [f"{eviction.num_evicted} evicted since the model was made"] if eviction.num_evicted else []
    return [*lines, f"templates for further sizes: about {templates} {limit}"]


def _transport(model: GPipe) -> list[str]:
    runner = runner_of(model)
    lines = describe_connections(runner.connections, runner.planner.latest)
    if lines and runner.planner.latest is None:
        lines.append("the sizes of boundary tensors are unknown until the first call")
    return lines


def fused_lines(model: GPipe) -> list[str]:
    """Returns report lines on the fused kernels of a model."""
    if all(device.type == "cpu" for device in model.devices):
        return []
    reasons = {why_unfused(device, model.fuse) for device in model.devices if device.type != "cpu"}
    if None not in reasons:
        return [f"none, because {reason}" for reason in reasons]
    replaced = [len(each) for _, _, each in replaced_by_graph(model)]
    groups = f"{sum(replaced)} groups of operators in {len(replaced)} graphs; model.explain(x) lists them"
    lines = [groups] * bool(replaced) + [f"left out: {kernel}" for kernel in left_out.names()]
    return lines or ["unknown until the first call"]


def replaced_by_graph(model: GPipe) -> Iterator[tuple[Stage, str, Sequence[Replaced]]]:
    """Yields each stage, each of its graphs, and what fused kernels replace in it."""
    for compiled in runner_of(model).planner.compiler.lowered():
        for lowered in compiled.traced.lowered.values():
            for graph, replaced in lowered.replaced.items():
                yield compiled.stage, graph, replaced


def describe_code(gpu: Capability, archs: str) -> str:
    """Returns a sentence on whether an extension has code for a GPU, and if not, what to do.

    Machine code runs on GPUs of its major version with the same or a higher minor version. PTX, which the
    driver compiles, runs on the same and all newer versions (CUDA C++ Programming Guide, Compute Capabilities
    and PTX Compatibility). Code and PTX of ``9.0a`` run on 9.0 only, those of ``10.0f`` on its major version.

    Args:
        gpu: the compute capability of the GPU.
        archs: the architectures for which the extension was built, as in TORCH_CUDA_ARCH_LIST, such as
            ``8.0;9.0+PTX``; or ``none`` for a build without CUDA.
    """
    version = f"{gpu[0]}.{gpu[1]}"
    setting = f"TORCH_CUDA_ARCH_LIST={version}"
    if archs == "none":
        return f"the extension was built without CUDA; rebuild it with a CUDA toolkit for {setting}"
    machine_code, ptx = list[Capability](), list[Capability]()
    for major, minor, suffix, has_ptx in re.findall(r"(\d+)\.(\d+)([af]?)(\+PTX)?", archs):
        built = int(major), int(minor)
        if built[0] == gpu[0] and (built == gpu if suffix == "a" else built <= gpu):
            machine_code.append(built)
        if has_ptx and not suffix and built <= gpu:
            ptx.append(built)
    if machine_code:
        return "the extension has code for it, built for {}.{}".format(*max(machine_code))
    if ptx:
        newest = "{}.{}".format(*max(ptx))
        return (
            f"the extension has PTX for it, of {newest}, which the driver compiles when it is loaded; "
            f"rebuild with {setting} to avoid that"
        )
    return f"the extension has no code for {version}, only for {archs}; rebuild it with {setting}"
