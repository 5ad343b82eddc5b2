"""Models of libraries as pipelines of `GPipe.from_model`: which run natively, and whether a step is equal.

`python -m tools census` examines the smallest model of each family of torchvision, and the models of
`tools.library_models`; `python -m tools census 'resnet*' 'Llama*'` examines every constructor of torchvision
and every model whose name matches a pattern, and writes no table.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import re
import sys
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bench.measure import ROOT, Table
from bench.measure import write as write_tables
from gpipe_fast import GPipe, verify
from gpipe_fast.layers.structure import flatten
from gpipe_fast.reports.verify import Report
from tools import library_models

NUM_STAGES, CHUNKS, BATCH = 3, 2, 4

# The smallest model of each family, whose larger models have the same kinds of blocks.
FAMILIES = (
    "alexnet convnext_tiny deeplabv3_mobilenet_v3_large deeplabv3_resnet50 densenet121 efficientnet_b0 "
    "efficientnet_v2_s fcn_resnet50 googlenet inception_v3 lraspp_mobilenet_v3_large maxvit_t mc3_18 "
    "mnasnet0_5 mobilenet_v2 mobilenet_v3_small mvit_v1_b mvit_v2_s quantized_googlenet "
    "quantized_inception_v3 quantized_mobilenet_v2 quantized_mobilenet_v3_large quantized_resnet18 "
    "quantized_shufflenet_v2_x0_5 r2plus1d_18 r3d_18 regnet_x_400mf regnet_y_400mf resnet18 resnet50 "
    "resnext50_32x4d s3d shufflenet_v2_x0_5 squeezenet1_1 swin3d_t swin_t swin_v2_t vgg11 "
    "vgg11_bn vit_b_16 wide_resnet50_2"
)

_DETECTOR = "takes lists of images and targets, and its computation depends on the boxes that it detects"
EXCLUDED = {
    "fasterrcnn_*": _DETECTOR,
    "fcos_*": _DETECTOR,
    "keypointrcnn_*": _DETECTOR,
    "maskrcnn_*": _DETECTOR,
    "raft_*": "its 12 updates share their weights, so most of it would be one block",
    "retinanet_*": _DETECTOR,
    "ssd*": _DETECTOR,
}

# Shapes of one sample; the first matching pattern counts. The sizes are small, but large enough that no batch
# norm sees a single value.
SHAPES: dict[str, tuple[int, ...]] = {
    "*inception_v3": (3, 96, 96),
    "maxvit_t": (3, 224, 224),
    "mvit_*": (3, 8, 64, 64),
    "r3d_18": (3, 4, 32, 32),
    "mc3_18": (3, 4, 32, 32),
    "r2plus1d_18": (3, 4, 32, 32),
    "s3d": (3, 16, 224, 224),
    "swin3d_*": (3, 4, 64, 64),
    "*": (3, 64, 64),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "vit_*": {"image_size": 64},
    "googlenet": {"aux_logits": False, "init_weights": False},
    "inception_v3": {"aux_logits": False, "init_weights": False},
    "quantized_googlenet": {"aux_logits": False, "init_weights": False, "quantize": False},
    "quantized_inception_v3": {"aux_logits": False, "init_weights": False, "quantize": False},
    "quantized_*": {"quantize": False},
    "deeplabv3_*": {"weights_backbone": None},
    "fcn_*": {"weights_backbone": None},
    "lraspp_*": {"weights_backbone": None},
    "*": {},
}


def _first_match(table: dict[str, Any], name: str) -> Any:
    return next(value for pattern, value in table.items() if fnmatch(name, pattern))


def build(name: str) -> nn.Module:
    """Returns a torchvision model with its default initialization."""
    models = importlib.import_module("torchvision.models")
    torch.manual_seed(0)
    # The constructors of MViT take no size of videos.
    mvit = importlib.import_module("torchvision.models.video.mvit")
    small = {"spatial_size": (64, 64), "temporal_size": 8}
    with mock.patch.object(mvit, "MViT", lambda kind=mvit.MViT, **options: kind(**options | small)):
        model: nn.Module = models.get_model(name, weights=None, **_first_match(OPTIONS, name))
    return model


def perturb_constants(model: nn.Module) -> nn.Module:
    """Perturbs constant parameters: for example, a zero head would make every gradient before it zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


_REMARKS = {
    "googlenet": "aux_logits=False",
    "inception_v3": "aux_logits=False",
    "quantized_googlenet": "aux_logits=False, quantize=False",
    "quantized_inception_v3": "aux_logits=False, quantize=False",
    "quantized_*": "quantize=False",
    "mvit_*": "8 frames of 64 x 64",
    "*": "",
}


@dataclass(frozen=True)
class Verdict:
    """The result for one model.

    Attributes:
        name: the name of the class or constructor.
        report: the comparison with the plain loop; None if there is no pipeline.
        note: how the model was reduced, and what went wrong.
        num_layers: number of layers: what comes before the blocks, each block, and the rest.
        in_python: for each kind of layer in Python, its class and the reason.
    """

    name: str
    report: Report | None = None
    note: str = ""
    num_layers: int = 0
    in_python: tuple[str, ...] = ()

    @property
    def result(self) -> str:
        """'equal', or the number of differing tensors and the largest relative difference."""
        if self.report is None:
            return "not native"
        if self.report.ok:
            return "equal"
        wrong = [row for row in self.report.rows if not row.equal]
        worst = max(wrong, key=lambda row: row.relative)
        return f"{len(wrong)} of {len(self.report.rows)} tensors differ, {worst.name} by {worst.relative:.1e}"

    def row(self) -> list[object]:
        """Returns the row in the table of torchvision."""
        tensors = len(self.report.rows) if self.report else ""
        return [self.name, self.num_layers or "", tensors, self.result, self.note]

    def row_of_library(self) -> list[object]:
        """Returns the row in the table of other libraries."""
        if self.report is None:
            return [self.name, self.note, "; ".join(self.in_python)]
        return [self.name, self.result, "; ".join(self.in_python) or "native"]


def loss_of(output: object) -> Tensor:
    """Returns a weighted sum of all outputs, with random weights so that gradients do not cancel."""
    generator = torch.Generator().manual_seed(2)
    tensors, _ = flatten(output)
    return torch.stack([(t * torch.randn(t.shape, generator=generator)).mean() for t in tensors]).sum()


def count_dead_gradients(model: nn.Module, x: Tensor) -> int:
    """Returns the number of parameters whose gradient is missing or zero: comparing these proves nothing.

    Raises:
        AssertionError: a gradient is not finite, so comparing it would prove nothing either.
    """
    for module in model.modules():
        if type(module).__name__ in ("Dropout", "StochasticDepth"):
            module.eval()  # stochastic depth would zero gradients at random
    gradients = torch.autograd.grad(loss_of(model(x)), list(model.parameters()), allow_unused=True)
    model.train()
    assert all(g is None or bool(g.isfinite().all()) for g in gradients), "a gradient is not finite"
    return sum(g is None or not g.any() for g in gradients)


def compare(model: nn.Module, x: Tensor, name: str = "", note: str = "") -> Verdict:
    """Compares one step of the model as a pipeline with the plain loop; its running statistics change."""
    num_dead = count_dead_gradients(perturb_constants(model), x)
    notes = [note, f"{num_dead} gradients are zero" if num_dead else ""]
    try:
        pipe = GPipe.from_model(model, (x,), devices=["cpu"] * NUM_STAGES, chunks=CHUNKS, backend="aten")
        found = Verdict(name, verify(pipe, x, loss_fn=loss_of), num_layers=sum(pipe.balance))
    except RuntimeError as error:  # it names the layer
        found, notes = Verdict(name), [*notes, str(error).splitlines()[0]]
    return replace(found, note="; ".join(filter(None, notes)))


def examine(name: str) -> Verdict:
    """Builds a constructor's model and compares one pipelined step with the plain loop."""
    x = torch.randn(BATCH, *_first_match(SHAPES, name), generator=torch.Generator().manual_seed(1))
    try:
        verdict = compare(build(name), x, name, _first_match(_REMARKS, name))
    except Exception as error:
        verdict = Verdict(name, note=f"{type(error).__name__}: {error}".splitlines()[0])
    gc.collect()
    print(*verdict.row(), sep=" | ", flush=True)
    return verdict


def examine_library(name: str) -> Verdict:
    """Builds a model of a library and compares one pipelined step with the plain loop."""
    model = library_models.MODELS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            plain, inputs = model.pipelined(model.build(name))
            pipe = GPipe.from_model(plain, kwargs=inputs, devices=["cpu"] * 2, chunks=3)
            verdict = Verdict(name, verify(pipe, **inputs, loss_fn=_loss_of_library))
        except Exception as error:
            text = _FOLDERS.sub("", f"{type(error).__name__}: {error}".splitlines()[0])
            verdict = Verdict(name, note=textwrap.shorten(text, 160, placeholder="..."))
    found = (_IN_PYTHON.search(str(each.message)) for each in caught)
    in_python = tuple(dict.fromkeys(f"{each[1]}: {each[2]}" for each in found if each))
    gc.collect()
    verdict = replace(verdict, in_python=in_python)
    print(*verdict.row_of_library(), sep=" | ", flush=True)
    return verdict


# Where a library is installed.
_FOLDERS = re.compile(r"(?<=\s)/\S*/(?=(transformers|timm|diffusers)/)")
_IN_PYTHON = re.compile(r"layer \d+ \((.*?)\) runs in Python: (.*?)(; other layers|$)", re.DOTALL)


def _loss_of_library(output: Any) -> Tensor:
    loss: Tensor | None = getattr(output, "loss", None)
    return loss_of(list(filter(_is_differentiable, pytree.tree_leaves(output)))) if loss is None else loss


def _is_differentiable(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def write_libraries(verdicts: Sequence[Verdict]) -> None:
    """Prints the table and writes it to bench/results."""
    libraries = sorted({library_models.MODELS[v.name].library for v in verdicts})
    versions = [f"{name} {importlib.import_module(name).__version__}" for name in libraries]
    native = sum(v.report is not None and not v.in_python for v in verdicts)
    equal = sum(v.result == "equal" for v in verdicts)
    text = write_tables(
        "census_newest" if _are_newest() else "census_libraries",
        "Census of models of transformers, timm and diffusers" + ", newest releases" * _are_newest(),
        ["model", "compared with the plain loop", "layers in Python"],
        [
            *(v.row_of_library() for v in verdicts),
            [f"{len(verdicts)} models", f"{equal} equal", f"{native} native"],
        ],
        f"{', '.join(versions)}. Small models with random weights (`tools/library_models.py`), as pipelines "
        f"of `GPipe.from_model` in 2 stages. One step in training mode, {library_models.BATCH} samples in 3 "
        "micro-batches, float32, one thread. 'equal' means that output, loss, gradients and buffers are "
        "bitwise equal. The gradient of a weight that two stages share is summed in another order.\n",
    )
    print(text, flush=True)


def write(verdicts: Sequence[Verdict]) -> None:
    """Prints the tables and writes them to bench/results."""
    equal = sum(v.result == "equal" for v in verdicts)
    total = [f"{len(verdicts)} models", "", "", f"{equal} equal", ""]
    version = importlib.import_module("torchvision").__version__
    text = write_tables(
        "census_torchvision",
        "Census of torchvision's models",
        ["model", "layers", "tensors", "compared with the plain loop", "note"],
        [*(v.row() for v in verdicts), total],
        f"torchvision {version}. The smallest model of each family, with random weights, as a pipeline of "
        f"`GPipe.from_model` in {NUM_STAGES} stages, balanced by time; no layer runs in Python. One step in "
        f"training mode, {BATCH} samples in {CHUNKS} micro-batches, checkpoint='except_last', one thread. "
        "'equal' means that output, loss, gradients and buffers are bitwise equal.\n",
        [Table("Excluded constructors", ["constructor", "reason"], list(EXCLUDED.items()))],
    )
    print(text, flush=True)


def main(patterns: Sequence[str] = ()) -> None:
    """Examines the models whose names match a pattern; without patterns, all in tables, and writes these."""
    torch.set_num_threads(1)
    every = importlib.import_module("torchvision.models").list_models() if _has("torchvision") else []
    libraries = {model.library for model in library_models.MODELS.values()}
    known = {library for library in sorted(libraries) if _has(library)}
    models = [name for name, model in library_models.MODELS.items() if model.library in known]
    if not patterns:
        if every and not _are_newest():
            write([examine(name) for name in FAMILIES.split()])
        if models:
            write_libraries([examine_library(name) for name in models])
        return
    names = [name for name in every if any(fnmatch(name, p) for p in patterns)]
    others = [name for name in models if name not in names and any(fnmatch(name, p) for p in patterns)]
    if not names and not others:
        sys.exit(f"census: no model matches {', '.join(patterns)}")
    for name in names:
        examine(name)
    for name in others:
        examine_library(name)


def _are_newest() -> bool:
    """Returns whether libraries are those that `make smoke-newest` installs."""
    found = importlib.util.find_spec("transformers")
    return found is not None and str(found.origin).startswith(f"{ROOT / 'build' / 'newest'}")


def _has(library: str) -> bool:
    found = importlib.util.find_spec(library) is not None
    if not found:
        print(f"census: skipped {library}, which is not installed")
    return found
