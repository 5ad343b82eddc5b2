"""Every torchvision model as a pipeline: which layers run natively, and whether a step is bitwise equal."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

import torch
from torch import Tensor, nn

from bench.measure import Table
from bench.measure import write as write_tables
from gpipe_fast import GPipe, verify
from gpipe_fast.layers.structure import flatten
from gpipe_fast.reports.verify import Report
from tools.sequences import as_sequence, build_perturbed, exclusion_reason, reduction_note, shape_of

NUM_STAGES, CHUNKS, BATCH = 3, 2, 4


@dataclass(frozen=True)
class Verdict:
    """The result for one model.

    Attributes:
        num_layers: number of layers in the sequence.
        refused: layers that cannot be lowered, with the reasons.
        report: the comparison with the plain loop; None if a layer was refused.
        note: how the model was reduced, and what went wrong.
        name: name of the constructor.
        seconds: time to examine the model.
    """

    num_layers: int
    refused: dict[str, str]
    report: Report | None
    note: str = ""
    name: str = ""
    seconds: float = 0.0

    @property
    def num_native(self) -> int:
        """Number of lowered layers."""
        return self.num_layers - len(self.refused)

    @property
    def result(self) -> str:
        """'equal', or the number of differing tensors and the largest relative difference."""
        if self.report is None:
            return "-"
        if self.report.ok:
            return "equal"
        wrong = [row for row in self.report.rows if not row.equal]
        worst = max(wrong, key=lambda row: row.relative)
        return f"{len(wrong)} tensors differ, {worst.name} by {worst.relative:.1e}"

    def row(self) -> list[object]:
        """Returns the table row."""
        share = f"{self.num_native / self.num_layers:.0%}" if self.num_layers else "-"
        return [self.name, self.num_layers, self.num_native, share, self.result, self.note]


def loss_of(output: object) -> Tensor:
    """Returns a weighted sum of all outputs, with random weights so that gradients do not cancel."""
    generator = torch.Generator().manual_seed(2)
    tensors, _ = flatten(output)
    return torch.stack([(t * torch.randn(t.shape, generator=generator)).mean() for t in tensors]).sum()


def check_outputs(model: nn.Module, sequence: nn.Sequential, x: Tensor) -> None:
    """Raises AssertionError unless model and sequence return bitwise equal outputs in evaluation mode."""
    model.eval()
    with torch.no_grad():
        (wanted, _), (found, _) = flatten(model(x)), flatten(sequence(x))
    model.train()
    assert len(wanted) == len(found)
    assert all(map(torch.equal, wanted, found)), "the sequence computes another function than the model"


def count_dead_gradients(sequence: nn.Sequential, x: object) -> int:
    """Returns the number of parameters whose gradient is missing or zero: comparing these proves nothing.

    Raises:
        AssertionError: a gradient is not finite, so comparing it would prove nothing either.
    """
    for module in sequence.modules():
        if type(module).__name__ in ("Dropout", "StochasticDepth"):
            module.eval()  # stochastic depth would zero gradients at random
    parameters = list(sequence.parameters())
    gradients = torch.autograd.grad(loss_of(sequence(x)), parameters, allow_unused=True)
    sequence.train()
    assert all(g is None or bool(g.isfinite().all()) for g in gradients), "a gradient is not finite"
    return sum(g is None or not g.any() for g in gradients)


def examine(name: str) -> Verdict:
    """Builds a constructor's model and compares one pipelined step with the plain loop."""
    start, shape = time.perf_counter(), shape_of(name)
    x = torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(1))
    verdict = compare(build_perturbed(name), x, shape[-2:])
    notes = filter(None, [reduction_note(name), verdict.note])
    return replace(verdict, name=name, seconds=time.perf_counter() - start, note="; ".join(notes))


def compare(model: nn.Module, x: Tensor, size: Sequence[int]) -> Verdict:
    """Compares one step of the model as a pipeline with the plain loop.

    Args:
        model: the model; its running statistics change.
        x: a mini-batch.
        size: height and width of the images.
    """
    sequence = as_sequence(model, size)
    assert sequence is not None, f"no rule for {type(model).__name__}"
    check_outputs(model, sequence, x)
    num_dead = count_dead_gradients(sequence, x)
    note = f"{num_dead} gradients are zero" if num_dead else ""
    cuts = [len(sequence) * i // NUM_STAGES for i in range(NUM_STAGES + 1)]
    balance = [end - begin for begin, end in itertools.pairwise(cuts)]
    pipe = GPipe(sequence, balance, devices=["cpu"] * NUM_STAGES, chunks=CHUNKS, backend="aten")
    try:
        return Verdict(len(sequence), {}, verify(pipe, x, loss_of), note)
    except RuntimeError as error:  # it names the layer
        return Verdict(len(sequence), {"the first": str(error).splitlines()[0]}, None, note)


def _examine_safely(name: str) -> Verdict:
    try:
        verdict = examine(name)
    except Exception as error:
        verdict = Verdict(0, {}, None, f"{type(error).__name__}: {error}".splitlines()[0], name)
    gc.collect()
    print(*verdict.row(), f"{verdict.seconds:.1f} s", *verdict.refused.items(), sep=" | ", flush=True)
    return verdict


def write(verdicts: Sequence[Verdict], skipped: dict[str, str]) -> None:
    """Prints the tables and writes them to bench/results."""
    layers, native = (sum(n) for n in zip(*((v.num_layers, v.num_native) for v in verdicts), strict=True))
    equal = sum(v.report is not None and v.report.ok for v in verdicts)
    total = [f"{len(verdicts)} models", layers, native, f"{native / layers:.1%}", f"{equal} equal", ""]
    refused = [(v.name, *item) for v in verdicts for item in v.refused.items()]
    more_tables = [Table("Excluded constructors", ["constructor", "reason"], sorted(skipped.items()))]
    if refused:
        more_tables.insert(0, Table("Layers that cannot run natively", ["model", "layer", "reason"], refused))
    version = importlib.import_module("torchvision").__version__
    text = write_tables(
        "census_torchvision",
        "Census of torchvision's models",
        ["model", "layers", "native", "share", "compared with the plain loop", "note"],
        [*(v.row() for v in verdicts), total],
        f"torchvision {version}. Every constructor's model has random weights and is rewritten as a sequence "
        f"of its blocks that computes the same function, in {NUM_STAGES} stages. One step in training mode, "
        f"{BATCH} samples in {CHUNKS} micro-batches, checkpoint='except_last', one thread. 'equal' means "
        "that output, loss, gradients and buffers are bitwise equal.\n",
        more_tables,
    )
    print(text, flush=True)


def main(patterns: Sequence[str] = ()) -> None:
    """Examines the models whose names match a pattern; without patterns, all, and writes the tables."""
    if importlib.util.find_spec("torchvision") is None:
        print("census: skipped, torchvision is not installed")
        return
    torch.set_num_threads(1)
    names = importlib.import_module("torchvision.models").list_models()
    skipped = {name: why for name in names if (why := exclusion_reason(name))}
    names = [name for name in names if name not in skipped]
    names = [name for name in names if not patterns or any(fnmatch(name, p) for p in patterns)]
    verdicts = [_examine_safely(name) for name in names]
    if not patterns:
        write(verdicts, skipped)
