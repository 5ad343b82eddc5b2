"""The cost of a step on GPUs, counted without a GPU: launches, bytes, casts, events and CUDA runtime calls.

One training step after warm-up: forward and backward from a given output gradient, without an optimizer. The
counts come from the log of the fake CUDA runtime in tests/fake_cuda; no time is measured. The model is a GPT
in {STAGES} stages, width {WIDTH}, {HEADS} heads, sequence {LENGTH}, batch {BATCH}, {CHUNKS} micro-batches,
checkpoint 'except_last'; the plain loop recomputes every micro-batch. Host calls are all calls into the
runtime: launches, copies, fills, events, waits, queries and allocations. Each operator other than a view
counts as one launch; on a GPU it may launch several kernels. Operators, copies and fills inside a replayed
graph count as graph nodes, not as host calls. Bytes are the sizes of the tensors that operators read and
write, replayed or not, and of copies and fills. A cast is a copy between dtypes. Casts of parameters are the
casts of fp32 weights by autocast. Attention uses its mathematical form, the only one that the fake runtime
supports.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.measure import Table, report
from bench.models.gpt import gpt
from bench.peers import checkpointed, looped
from gpipe_fast import GPipe, doctor

STAGES, CHUNKS = 4, 8
WIDTH, HEADS, VOCAB, LENGTH, BATCH = 32, 4, 64, 8, 16
# The first two steps make plans; the third captures graphs.
WARM_UP = 4
BEGIN, END = "counted", "counted to here"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.float32}


@dataclass(frozen=True)
class Setup:
    """The model and the way it is trained.

    Attributes:
        mode: 'captured', 'uncaptured', or 'plain loop', which recomputes each stage as a whole.
        precision: 'fp32', 'bf16', or 'autocast' of fp32 parameters to bf16.
        devices: number of devices that the four stages share.
        blocks: number of blocks of the GPT.
        dropout: the probability of a dropout layer after each block; no such layer if 0.
    """

    mode: str
    precision: str
    devices: int = 1
    blocks: int = 24
    dropout: float = 0.0


def layers(setup: Setup) -> list[nn.Module]:
    """Returns embedding, blocks, norm and head; a dropout forms one layer with its block."""
    found: list[nn.Module] = []
    for name, layer in gpt(setup.blocks, WIDTH, HEADS, VOCAB, LENGTH).named_children():
        has_dropout = name.startswith("block") and setup.dropout > 0
        found.append(nn.Sequential(layer, nn.Dropout(setup.dropout)) if has_dropout else layer)
    return found


def balance(count: int) -> list[int]:
    """Returns the most even balance."""
    cuts = [count * stage // STAGES for stage in range(STAGES + 1)]
    return [end - begin for begin, end in itertools.pairwise(cuts)]


def build_forward(setup: Setup) -> tuple[Callable[[Tensor], Tensor], list[nn.Parameter]]:
    """Returns the pipeline or the plain loop, and its parameters on their devices."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers(setup)).to(DTYPES[setup.precision])
    if setup.mode == "plain loop":
        model.to("cuda:0")
        ends = list(itertools.accumulate(balance(len(model))))
        stages = [model[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        return looped(checkpointed(stages), CHUNKS), list(model.parameters())
    devices = [f"cuda:{stage * setup.devices // STAGES}" for stage in range(STAGES)]
    capture = setup.mode == "captured"
    pipe = GPipe(model, balance(len(model)), devices=devices, chunks=CHUNKS, capture=capture)
    return pipe, list(pipe.parameters())


HEADERS = (
    "devices", "mode", "precision", "host calls", "operators launched", "graphs launched",
    "graph nodes", "MB read", "MB written", "MB copied", "casts", "casts of parameters",
    "events recorded", "stream waits",
)  # fmt: skip
# Log lines that are not runtime calls.
NON_CALLS = {"read", "write", "mark", "stream"}


@dataclass
class Counts:
    """What one step did.

    Attributes:
        calls: host calls by kind of log line; operator launches have the kind 'operator'.
        nodes: nodes of replayed graphs, by the same kinds.
        operators: operators by name, replayed or not.
        casts: casts by source and target dtype.
        parameter_casts: casts that read a parameter.
        read, written, copied: bytes.
    """

    calls: Counter[str] = field(default_factory=Counter)
    nodes: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    casts: Counter[str] = field(default_factory=Counter)
    parameter_casts: int = 0
    read: int = 0
    written: int = 0
    copied: int = 0

    def cells(self) -> list[object]:
        launched = ("operator", "kernel")
        nodes = sum(self.nodes[kind] for kind in (*launched, "copy", "memset"))
        return [
            sum(self.calls.values()),
            sum(self.calls[kind] for kind in launched),
            self.calls["launch"],
            nodes,
            *(f"{count / 1e6:.2f}" for count in (self.read, self.written, self.copied)),
            sum(self.casts.values()),
            self.parameter_casts,
            self.calls["record"],
            self.calls["wait"],
        ]


def count(lines: Iterable[str], parameters: Container[str] = ()) -> Counts:
    """Counts the log lines between the marks.

    Args:
        lines: lines of the log.
        parameters: addresses of the parameters, in the log's notation.
    """
    counts, inside = Counts(), False
    graphs: dict[str, str] = {}  # threads that are launching a graph, and the stream that will wait for it
    for line in lines:
        thread, kind, *words = line.rstrip("\n").split("\t")
        if kind == "mark" and words[0] in (BEGIN, END):
            inside = words[0] == BEGIN
        elif inside and kind == "launch":
            counts.calls[kind] += 1
            graphs[thread] = words[0]
        elif inside:
            _count_line(counts, kind, words, counts.nodes if thread in graphs else counts.calls, parameters)
            if kind == "wait" and words[:2] == [graphs.get(thread), "-1"]:
                del graphs[thread]
    return counts


def _count_line(
    counts: Counts, kind: str, words: Sequence[str], counter: Counter[str], parameters: Container[str]
) -> None:
    if kind == "mark" and words[0] == "operator":
        _, name, *cast = words
        counter["operator"] += 1
        counts.operators[name] += 1
        if cast:
            _count_cast(counts, cast, parameters)
    elif kind == "mark" and words[0] == "cast":
        _count_cast(counts, words[1:], parameters)
    elif kind == "read":
        counts.read += int(words[-1])
    elif kind == "write":
        counts.written += int(words[-1])
    elif kind not in NON_CALLS:
        counter[kind] += 1
        counts.copied += int(words[-1]) if kind in ("copy", "memset") else 0


def _count_cast(counts: Counts, cast: Sequence[str], parameters: Container[str]) -> None:
    source, target, address = cast
    counts.casts[f"{source} to {target}"] += 1
    counts.parameter_casts += address in parameters


def train(fields: Mapping[str, Any], operators: str) -> tuple[list[str], str]:
    """Trains in this process, and marks the last step in the log of the fake runtime.

    Gradients are reset before each step and no optimizer runs: only forward and backward are counted.

    Args:
        fields: the fields of a `Setup`.
        operators: the library of the operators for the fake runtime's devices.

    Returns:
        the addresses of the parameters, and what `doctor` says of a pipeline.
    """
    setup, mark = Setup(**fields), ctypes.CDLL(None).fake_cuda_mark
    torch.ops.load_library(operators)
    torch.backends.cudnn.enabled = False
    for enable in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"):
        getattr(torch.backends.cuda, enable)(False)
    forward, parameters = build_forward(setup)
    addresses = [hex(parameter.data_ptr()) for parameter in parameters]
    x = torch.randint(VOCAB, (BATCH, LENGTH)).to("cuda:0")
    gradient = torch.randn(BATCH, LENGTH, VOCAB).to(f"cuda:{setup.devices - 1}")
    gradient = gradient.to(torch.float32 if setup.precision == "fp32" else torch.bfloat16)
    use_autocast = setup.precision == "autocast"
    for step in range(WARM_UP + 1):
        for parameter in parameters:
            parameter.grad = None
        if step == WARM_UP:
            mark(BEGIN.encode())
        with torch.autocast("cuda", torch.bfloat16, enabled=use_autocast):
            y = forward(x)
        y.backward(gradient)
        mark(END.encode())
    return addresses, doctor(forward) if isinstance(forward, GPipe) else ""


def run(setup: Setup, libraries: tuple[Path, Path]) -> Counts:
    """Trains on the fake CUDA runtime and returns the counts of the last step.

    Raises:
        RuntimeError: the process failed, or a captured step was not replayed.
    """
    from tools import fake_cuda

    runtime, operators = libraries
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        variables = {"FAKE_CUDA_LOG": str(log), "FAKE_CUDA_NAMES": "1", "GPIPE_FAST_DISABLE": "fuse"}
        arguments = asdict(setup), str(operators)
        parameters, report_of_doctor = fake_cuda.call(
            runtime, "tools.cuda_counts:train", *arguments, environment=variables
        )
        with log.open() as lines:
            counts = count(lines, set(parameters))
    if setup.mode == "captured" and not counts.calls["launch"]:
        raise RuntimeError(f"{setup} was not replayed:\n{report_of_doctor}")
    return counts


def setups(blocks: int = 24) -> list[Setup]:
    """Returns the setups of the table."""
    precisions = ("fp32", "bf16", "autocast")
    found = [Setup("plain loop", precision, blocks=blocks) for precision in precisions]
    for devices in (1, 4):
        for mode in ("uncaptured", "captured"):
            found += [Setup(mode, precision, devices, blocks) for precision in precisions]
    return [*found, Setup("captured", "fp32", blocks=blocks, dropout=0.1)]


def tables(found: Sequence[tuple[Setup, Counts]]) -> tuple[list[list[object]], Table]:
    """Returns the rows of counts, and a table of operator launches on one device."""
    rows: list[list[object]] = []
    for setup, counts in found:
        precision = setup.precision + (f", dropout {setup.dropout:g}" if setup.dropout else "")
        rows.append([setup.devices, setup.mode, precision, *counts.cells()])
    columns = {
        f"{setup.mode}, {precision}": counts
        for (setup, counts), (_, _, precision, *_) in zip(found, rows, strict=True)
        if setup.devices == 1 and setup.mode != "uncaptured"
    }
    total = sum((counts.operators + counts.casts for counts in columns.values()), Counter[str]())
    lines = [
        [name, *((counts.operators + counts.casts)[name] for counts in columns.values())]
        for name, _ in sorted(total.items(), key=lambda item: (-item[1], item[0]))
    ]
    note = "Casts, listed by source and target dtype, are also counted as aten::copy_.\n"
    return rows, Table("Operators on one device", ["operator", *columns], lines, note)


def main() -> None:
    from tools import fake_cuda

    if (libraries := fake_cuda.libraries("cuda-counts")) is None:
        return
    found = []
    for setup in setups():
        print(f"counting {setup}", file=sys.stderr, flush=True)
        found.append((setup, run(setup, libraries)))
    rows, operators = tables(found)
    report(globals(), HEADERS, rows, [operators])
