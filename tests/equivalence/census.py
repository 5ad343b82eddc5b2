"""What becomes of every layer of torch.nn in a pipeline.

`python -m tests.equivalence.census` writes the table.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.runtime.compile import Compiler, Refusal
from gpipe_fast.runtime.stage import Boundary, Spec, Stage
from tests.equivalence.census_layers import OUT_OF_SCOPE, RECIPES, Fed, Recipe
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

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "census.md"
BUDGETS = (0.0, 0.5, 1.0)
LIMIT = 2.0  # times the error of the plain loop, both against float64
# Micro-batches, and samples that fill them: one; evenly; unevenly (2, 2, 2, 1).
ONE, EVEN, UNEVEN = (1, 2), (4, 8), (4, 7)


@dataclass(frozen=True)
class Verdict:
    """What became of one recipe.

    Attributes:
        reason: why it runs in Python, or None when it is lowered.
        rounded: memory formats in which it does not have the bits of the plain loop.
        worst: there, its largest error relative to the plain loop's own; both against float64.
    """

    reason: str | None = None
    rounded: frozenset[str] = frozenset()
    worst: float = 0.0

    def __str__(self) -> str:
        if self.reason is not None:
            return f"Python stage: {self.reason}"
        if self.rounded:
            kind = "native within rounding" if self.worst <= LIMIT else "native beyond rounding"
            return f"{kind} ({', '.join(sorted(self.rounded))}; {self.worst:.1f} times eager's error)"
        return "native and equal"


class Scale(nn.Module):
    """A trainable factor, so that the layer under test has neighbours, and its input is no boundary."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def model_of(recipe: Recipe) -> nn.Sequential:
    """One stage's layers."""
    torch.manual_seed(1)
    layer = recipe.make()
    if recipe.feed is not None:
        layer = Fed(layer, recipe.feed)
    model = nn.Sequential(layer, Scale(0.75))
    if not recipe.integers:
        model.insert(0, Scale(1.25))
    if any(isinstance(p, nn.parameter.UninitializedTensorMixin) for p in model.parameters()):
        with torch.no_grad():
            model(inputs_of(recipe, 2)["contiguous"])  # a lazy layer learns its shape
    return model


def inputs_of(recipe: Recipe, samples: int) -> dict[str, Tensor]:
    """The same mini-batch in every memory format it can have."""
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


def refusal(model: nn.Sequential, x: Tensor) -> str | None:
    """Why the model cannot be one lowered stage, or None."""
    stage = Stage(list(model), 0, torch.device("cpu"))
    compiled = Compiler().compile([stage], [Boundary((Spec.of(x, x.is_floating_point()),))])
    return compiled.untraceable.reason if isinstance(compiled, Refusal) else None


def examine(name: str, thorough: bool = False) -> Verdict:
    """Compares one recipe with the plain loop: training at every budget, and inference.

    Args:
        name: of the recipe.
        thorough: every memory format with every cut into micro-batches.
    """
    recipe = RECIPES[name]
    model = model_of(recipe)
    reason = refusal(model, inputs_of(recipe, 2)["contiguous"])
    if reason is not None:
        return Verdict(reason)
    pipe = GPipe(model, [len(model)])
    rounded: dict[str, float] = {}
    for chunks, samples in (ONE, EVEN, UNEVEN):
        for memory_format, x in inputs_of(recipe, samples).items():
            sampled = (chunks, samples) == UNEVEN or (chunks == 1 and memory_format == "contiguous")
            if not (thorough or sampled):
                continue
            pipe.chunks = chunks
            gradient = _gradient(model, x, chunks)
            expected = loop_step(model, x, chunks, gradient=gradient)
            assert all(v is None or v.isfinite().all() for v in expected.values()), (
                "the recipe makes no number"
            )
            for budget in BUDGETS:
                result = pipeline_step(pipe, x, budget, gradient=gradient)
                if unequal(result, expected):
                    worse = _relative_error(model, x, chunks, gradient, result, expected)
                    rounded[memory_format] = max(worse, rounded.get(memory_format, 0.0))
    model.eval()
    pipe.eval()
    for memory_format, x in inputs_of(recipe, UNEVEN[1]).items():
        with torch.no_grad():
            if not torch.equal(pipeline(pipe, x), plain_loop(model, x, UNEVEN[0])):
                rounded.setdefault(memory_format, 1.0)
    return Verdict(None, frozenset(rounded), max(rounded.values(), default=0.0))


def _gradient(model: nn.Sequential, x: Tensor, chunks: int) -> Tensor:
    with torch.no_grad():
        return gradient_like(plain_loop(copy.deepcopy(model), x, chunks))


def _relative_error(
    model: nn.Sequential, x: Tensor, chunks: int, gradient: Tensor, ours: Result, eager: Result
) -> float:
    exact = copy.deepcopy(model).double()
    x = x.double() if x.is_floating_point() else x
    truth = loop_step(exact, x, chunks, gradient=gradient.double())
    own, theirs = error(ours, truth), error(eager, truth)
    # Eager may be right to the last bit by luck where the result is still the nearest but one.
    floor = {
        n: 2 * torch.finfo(torch.float32).eps * float(t.abs().max())
        for n, t in truth.items()
        if t is not None
    }
    return max(own[n] / max(theirs[n], floor[n], 1e-30) for n in own)


def _count(verdicts: dict[str, Verdict]) -> Counter[str]:
    return Counter(str(v).split(":")[0].split(" (")[0] for v in verdicts.values())


def table(verdicts: dict[str, Verdict]) -> str:
    """The census as markdown."""
    counts = _count(verdicts)
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
    """Runs the whole census and writes the table."""
    torch.set_num_threads(1)
    verdicts = {name: examine(name, thorough=True) for name in RECIPES}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(table(verdicts))
    print(f"wrote {RESULTS.name}:", dict(_count(verdicts)))


if __name__ == "__main__":
    main()
