"""Trains stages with fused kernels on a fake device; run by test_fusion.py with the fake runtime preloaded.

`fusion_cases.py OPERATORS STAGE PRECISION CHECKPOINT [CAPTURE]`: loads the operators, and runs steps of a
stage of tools/stages.py (``GPT``) in a precision (``bf16``) with fused kernels, which Triton's
interpreter runs, and without. Prints a JSON object: for the output and each gradient, the error against
float64 with and without fused kernels; the kernels that were launched; and the warnings.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, keyed_rng, replicate
from tests.fake_cuda import interpreter
from tests.fake_cuda.cubin_files import keep_cubins
from tests.fake_cuda.fake_devices import load
from tests.internals import programs_of
from tools.stages import PRECISIONS, STAGES, Precision, Size, Stage

SIZE = Size(batch=4, length=16, width=32, heads=4, vocab=48)
CHUNKS = 2
CAPTURED_STEPS = 4
DEVICE = torch.device("cuda:0")


def register_kernels() -> None:
    """Makes the interpreter know every kernel that a program loads."""
    keep_cubins()
    interpreter.register_loaded(lambda launch: launch.kernel)


def inputs_of(stage: Stage, precision: Precision, seed: int) -> list[Tensor]:
    """Returns a mini-batch of inputs on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for empty in stage.inputs(SIZE, precision.parameters):
        if empty.is_floating_point():
            values = torch.randn(empty.shape, generator=generator).to(empty.dtype)
            found.append(values.requires_grad_(empty.requires_grad))
        else:
            found.append(torch.randint(SIZE.vocab, empty.shape, generator=generator))
    return found


def results(model: nn.Module, inputs: list[Tensor], precision: Precision) -> list[Tensor]:
    """Returns the outputs and all gradients of one step."""
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.grad = None
    with precision.enter():
        output = model(inputs[0] if len(inputs) == 1 else tuple(map(whole_tables, inputs)))
    output = output[0] if isinstance(output, tuple) else output
    weights = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
    output.backward(weights.to(output.dtype).to(output.device))
    found = [output, *(x.grad for x in inputs if x.requires_grad), *(p.grad for p in model.parameters())]
    return [t.detach().cpu().double() for t in found]


def whole_tables(x: Tensor) -> Any:
    """Keeps the tables of a rotary embedding, which have no batch dimension, from being split."""
    return x if len(x) == SIZE.batch or x.dtype == torch.float64 else replicate(x)


class Row(nn.Module):
    """Makes a loss one row, because the outputs of micro-batches are concatenated."""

    def forward(self, loss: Tensor) -> Tensor:
        return loss.reshape(1)


class PlainLoop(nn.Module):
    """Computes in float64 what the pipeline approximates."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*copy.deepcopy(layers)).double()

    def forward(self, inputs: Any) -> Tensor:
        parts = [x.chunk(CHUNKS) if x.shape[0] == SIZE.batch else [x] * CHUNKS for x in tuple_of(inputs)]
        found = []
        for chunk in zip(*parts, strict=True):
            output = self.layers(chunk[0] if len(chunk) == 1 else chunk)
            found.append(output[0] if isinstance(output, tuple) else output)
        return torch.cat(found)


def tuple_of(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def main(name: str, mode: str, checkpoint: str, capture: str = "") -> None:
    register_kernels()
    stage, precision = STAGES[name], PRECISIONS[mode]
    torch.manual_seed(0)
    layers = [layer.to(precision.parameters) for layer in stage.layers(SIZE)]
    layers += [Row()] if name.startswith("head") else []
    print(json.dumps(compare(stage, precision, layers, checkpoint, bool(capture))))


def compare(
    stage: Stage, precision: Precision, layers: list[nn.Module], checkpoint: str, capture: bool
) -> dict[str, Any]:
    steps = CAPTURED_STEPS if capture else 1
    errors = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        models = {
            fuse: GPipe(
                nn.Sequential(*copy.deepcopy(layers)), [len(layers)], devices=[DEVICE], chunks=CHUNKS,
                checkpoint=checkpoint, capture=capture, fuse=fuse,
            )
            for fuse in (True, False)
        }  # fmt: skip
        for step in range(steps):
            given = inputs_of(stage, precision, step)
            exact = exact_results(layers, given)
            errors = [errors_of(model, given, exact, precision) for model in models.values()]
    return {
        "errors": list(zip(*errors, strict=True)),
        "kernels": sorted(kernels_of(models[True])),
        "warnings": [t for t in (str(w.message) for w in caught) if "in Python" in t or "left out" in t],
        "failures": interpreter.failures(),
    }


def exact_results(layers: list[nn.Module], given: list[Tensor]) -> list[Tensor]:
    loop = PlainLoop(layers)
    own = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in given]
    with keyed_rng(loop.layers):
        return results(loop, own, PRECISIONS["fp32"])


def errors_of(
    model: GPipe, given: list[Tensor], exact: list[Tensor], precision: Precision
) -> list[tuple[float, float]]:
    """Returns the error of each result, and one rounding, as root mean squares of the elements.

    Some results have 32 elements: their largest error would be a matter of chance.
    """
    own = [x.detach().to(DEVICE).requires_grad_(x.requires_grad) for x in given]
    found = results(model, own, precision)
    pairs = zip(found, exact, strict=True)
    eps = torch.finfo(precision.parameters).eps
    return [(_size(a - b), eps * _size(b)) for a, b in pairs]


def _size(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def kernels_of(model: GPipe) -> set[str]:
    """Returns the names of the kernels that the model's programs launch."""
    return {step.launch.name for p in programs_of(model) for step in p.steps if hasattr(step, "launch")}


if __name__ == "__main__":
    load(sys.argv[1], deterministic=False)
    main(*sys.argv[2:])
