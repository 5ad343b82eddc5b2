"""The census of torch.nn: whether each layer is lowered, and whether it equals the plain loop.

`python -m tests.contracts.contract_1_same_bits.census` writes the table to `bench/results/census.md`.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.runtime.compile import CompilationFailure, Compiler
from gpipe_fast.runtime.stage import BoundarySpec, Stage, TensorSpec
from tests.contracts.contract_1_same_bits.census_layers import (
    OUT_OF_SCOPE,
    RECIPES,
    Recipe,
    SingleTensorLayer,
)
from tests.reference import (
    Result,
    error,
    gradient_like,
    loop_step,
    pipeline,
    pipeline_step,
    plain_loop,
    unequal,
)

RESULTS = Path(__file__).parents[3] / "bench" / "results" / "census.md"
BUDGETS = (0.0, 0.5, 1.0)
MAX_ERROR_RATIO = 2.0  # largest error, as a multiple of the plain loop's; both against float64
# (Number of micro-batches, number of samples); UNEVEN has micro-batches of 2, 2, 2 and 1 samples.
ONE, EVEN, UNEVEN = (1, 2), (4, 8), (4, 7)


@dataclass(frozen=True)
class Verdict:
    """The result of one recipe.

    Attributes:
        reason: why the layer runs in Python, or None if it is lowered.
        inexact_formats: memory formats in which the results differ from the plain loop's by rounding.
        max_error_ratio: the largest error there, relative to the plain loop's; both against float64.
    """

    reason: str | None = None
    inexact_formats: frozenset[str] = frozenset()
    max_error_ratio: float = 0.0

    def __str__(self) -> str:
        if self.reason is not None:
            return f"Python stage: {self.reason}"
        if self.inexact_formats:
            kind = (
                "native within rounding"
                if self.max_error_ratio <= MAX_ERROR_RATIO
                else "native beyond rounding"
            )
            formats = ", ".join(sorted(self.inexact_formats))
            return f"{kind} ({formats}; {self.max_error_ratio:.1f} times eager's error)"
        return "native and equal"


class TrainableScale(nn.Module):
    """A trainable factor; placed around the tested layer, so that its input is not a boundary activation."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def model_of(recipe: Recipe) -> nn.Sequential:
    """Returns the layers of one stage, among them the recipe's layer."""
    torch.manual_seed(1)
    layer = recipe.make()
    if recipe.call is not None:
        layer = SingleTensorLayer(layer, recipe.call)
    model = nn.Sequential(layer, TrainableScale(0.75))
    if not recipe.integers:
        model.insert(0, TrainableScale(1.25))
    if any(isinstance(p, nn.parameter.UninitializedTensorMixin) for p in model.parameters()):
        with torch.no_grad():
            model(inputs_of(recipe, 2)["contiguous"])  # initializes the parameters of a lazy layer
    return model


def inputs_of(recipe: Recipe, samples: int) -> dict[str, Tensor]:
    """Returns the same mini-batch in every memory format that its number of dimensions allows."""
    generator = torch.Generator().manual_seed(3)
    size = (samples, *recipe.shape)
    if recipe.integers:
        x = torch.randint(recipe.integers, size, generator=generator)
    else:
        x = torch.randn(size, generator=generator)
    formats = {"contiguous": x}
    if x.dim() == 4:
        formats["channels_last"] = x.contiguous(memory_format=torch.channels_last)
    if x.dim() == 5:
        formats["channels_last_3d"] = x.contiguous(memory_format=torch.channels_last_3d)
    if x.dim() > 2:
        formats["permuted"] = x.transpose(1, -1).contiguous().transpose(1, -1)
    else:
        formats["permuted"] = torch.stack([x, x], -1)[..., 0]
    return formats


def reason_not_lowered(model: nn.Sequential, x: Tensor) -> str | None:
    """Returns the reason why the model cannot be lowered as one stage, or None."""
    stage = Stage(list(model), 0, torch.device("cpu"))
    compiled = Compiler().compile([stage], [BoundarySpec((TensorSpec.of(x, x.is_floating_point()),))])
    return compiled.untraceable.reason if isinstance(compiled, CompilationFailure) else None


def examine(name: str, thorough: bool = False) -> Verdict:
    """Compares a recipe's pipeline with the plain loop: training at every checkpoint budget, and inference.

    Args:
        name: the recipe's name.
        thorough: whether to combine every memory format with every number of micro-batches.
    """
    recipe = RECIPES[name]
    model = model_of(recipe)
    reason = reason_not_lowered(model, inputs_of(recipe, 2)["contiguous"])
    if reason is not None:
        return Verdict(reason)
    pipe = GPipe(model, [len(model)])
    error_ratios: dict[str, float] = {}
    for chunks, samples in (ONE, EVEN, UNEVEN):
        for memory_format, x in inputs_of(recipe, samples).items():
            sampled = (chunks, samples) == UNEVEN or (chunks == 1 and memory_format == "contiguous")
            if not (thorough or sampled):
                continue
            pipe.chunks = chunks
            gradient = _output_gradient(model, x, chunks)
            expected = loop_step(model, x, chunks, gradient=gradient)
            assert all(v is None or v.isfinite().all() for v in expected.values()), (
                "the recipe's results are not finite"
            )
            for budget in BUDGETS:
                result = pipeline_step(pipe, x, budget, gradient=gradient)
                if unequal(result, expected):
                    ratio = _error_ratio(model, x, chunks, gradient, result, expected)
                    error_ratios[memory_format] = max(ratio, error_ratios.get(memory_format, 0.0))
    model.eval()
    pipe.eval()
    for memory_format, x in inputs_of(recipe, UNEVEN[1]).items():
        with torch.no_grad():
            if not torch.equal(pipeline(pipe, x), plain_loop(model, x, UNEVEN[0])):
                error_ratios.setdefault(memory_format, 1.0)
    return Verdict(None, frozenset(error_ratios), max(error_ratios.values(), default=0.0))


def _output_gradient(model: nn.Sequential, x: Tensor, chunks: int) -> Tensor:
    with torch.no_grad():
        return gradient_like(plain_loop(copy.deepcopy(model), x, chunks))


def _error_ratio(
    model: nn.Sequential, x: Tensor, chunks: int, gradient: Tensor, ours: Result, eager: Result
) -> float:
    exact = copy.deepcopy(model).double()
    x = x.double() if x.is_floating_point() else x
    truth = loop_step(exact, x, chunks, gradient=gradient.double())
    our_errors, eager_errors = error(ours, truth), error(eager, truth)
    # The plain loop may be exact by chance, so an error of up to two ulps of the largest element is allowed.
    floor = {
        n: 2 * torch.finfo(torch.float32).eps * float(t.abs().max())
        for n, t in truth.items()
        if t is not None
    }
    return max(our_errors[n] / max(eager_errors[n], floor[n], 1e-30) for n in our_errors)


def _count_by_kind(verdicts: dict[str, Verdict]) -> Counter[str]:
    return Counter(str(v).split(":")[0].split(" (")[0] for v in verdicts.values())


def table(verdicts: dict[str, Verdict]) -> str:
    """Returns the census as Markdown."""
    counts = _count_by_kind(verdicts)
    classes = {name.split()[0] for name in verdicts}
    lines = [
        "# Census of torch.nn",
        "",
        f"torch {torch.__version__.split('+')[0]}, CPU, one thread. {len(classes)} classes in "
        f"{len(verdicts)} configurations; {len(OUT_OF_SCOPE)} classes out of scope.",
        "Budgets 0, 0.5 and 1; one micro-batch, four even and uneven ones; contiguous, channels_last",
        "and permuted inputs; training (output, gradients, buffers) and inference, against the plain loop.",
        "",
        "| result | configurations |",
        "|---|---|",
        *(f"| {kind} | {count} |" for kind, count in counts.most_common()),
        "",
        "| layer | result |",
        "|---|---|",
        *(f"| {name} | {verdict} |" for name, verdict in sorted(verdicts.items())),
        *(f"| {name} | out of scope: {reason} |" for name, reason in sorted(OUT_OF_SCOPE.items())),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the census and writes the table."""
    torch.set_num_threads(1)
    verdicts = {name: examine(name, thorough=True) for name in RECIPES}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(table(verdicts))
    print(f"wrote {RESULTS.name}:", dict(_count_by_kind(verdicts)))


if __name__ == "__main__":
    main()
