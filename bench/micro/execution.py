"""Programs of one stage and of single operators, compared with eager autograd.

Backward recomputes the forward, then adds to the gradients of an earlier micro-batch. Outputs and gradients
are bitwise equal to eager's. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.comparison import Comparison, Opened, report_comparisons
from bench.models.gpt import blocks
from bench.models.mlp import mlp
from gpipe_fast._extension import Arena
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.split import StageGraph, split
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole, parameters_of
from gpipe_fast.trace.trace import trace

Run = Callable[[bool], tuple[list[Tensor], list[Tensor | None]]]


@dataclass
class StageUnderTest:
    """A stage, the input of one micro-batch, and the gradient of its output."""

    layers: list[nn.Module]
    input: Tensor
    tangent: Tensor

    def program(self, graph: StageGraph) -> Run:
        """Returns `run(first)` of a graph."""
        program = lower(graph)
        native = program.build(Arena(), torch.device("cpu"))
        parameters = [p.detach() for p in parameters_of(self.layers)]
        native.bind(parameters)
        given = {GraphPort(GraphRole.INPUT, 0): self.input, GraphPort(GraphRole.TANGENT, 0): self.tangent}
        inputs = [given[port] for port in program.inputs]
        accumulators: list[Tensor | None] = [None] * len(parameters)

        def run(first: bool) -> tuple[list[Tensor], list[Tensor | None]]:
            nonlocal accumulators
            outputs, accumulators = native.run(inputs, accumulators, first)
            return outputs, accumulators

        return run


def prepare(layers: list[nn.Module], input: Tensor) -> tuple[StageUnderTest, StageGraph, StageGraph]:
    """Returns the stage, its forward graph, and its recomputing backward graph."""
    joint = trace(layers, [input.detach().requires_grad_()])
    parts = split(joint, FULL_RECOMPUTE)
    assert parts.backward is not None
    with torch.no_grad():
        tangent = torch.randn_like(nn.Sequential(*layers)(input))
    return StageUnderTest(layers, input, tangent), parts.forward, parts.backward


def check(stage: StageUnderTest, forward: Run, backward: Run) -> None:
    """Asserts that the programs' outputs and gradients are bitwise equal to eager's."""
    input = stage.input.detach().requires_grad_()
    model = nn.Sequential(*stage.layers)
    output = model(input)
    gradients = torch.autograd.grad(output, [input, *model.parameters()], stage.tangent)
    assert torch.equal(forward(True)[0][0], output)
    (input_gradient,), parameter_gradients = backward(True)
    for ours, theirs in zip([input_gradient, *parameter_gradients], gradients, strict=True):
        assert ours is not None
        assert torch.equal(ours, theirs)


def candidates(layers: list[nn.Module], input: Tensor) -> dict[str, Callable[[], object]]:
    """Returns the forward, the recomputing backward, and both, by our programs and by others.

    The backward is that of a later micro-batch: it adds to existing gradients.
    """
    stage, *graphs = prepare(layers, input)
    forward, backward = (stage.program(graph) for graph in graphs)
    check(stage, forward, backward)
    model, leaf = nn.Sequential(*layers), input.detach().requires_grad_()
    saved = model(leaf)
    return {
        "forward": lambda: forward(True),
        "forward, eager": torch.no_grad()(lambda: model(input)),
        "backward": lambda: backward(False),
        "backward, eager without recompute": lambda: saved.backward(stage.tangent, retain_graph=True),
        "both": lambda: (forward(True), backward(False)),
        "both, eager with checkpoint": lambda: checkpoint(model, leaf, use_reentrant=False).backward(
            stage.tangent
        ),
        "both, eager without recompute": lambda: model(leaf).backward(stage.tangent),
    }


@dataclass(frozen=True)
class Case:
    """Layers and the shape of their input.

    Attributes:
        layers: makes the layers.
        shape: the shape of the input.
        calls: calls per sample.
    """

    layers: Callable[[], list[nn.Module]]
    shape: tuple[int, ...]
    calls: int = 20


STAGES = {
    "2 x (Linear(64, 64), ReLU), batch 8": Case(mlp, (8, 64), 200),
    "2 GPT blocks of width 256, 2 x 128 tokens": Case(partial(blocks, 2), (2, 128, 256), 1),
}
OPERATORS = {
    "Linear": Case(lambda: [nn.Linear(256, 256)], (256, 256)),
    "LayerNorm": Case(lambda: [nn.LayerNorm(256)], (256, 256)),
    "GELU": Case(lambda: [nn.GELU()], (256, 256)),
    "Softmax": Case(lambda: [nn.Softmax(-1)], (256, 256)),
    "Conv2d": Case(lambda: [nn.Conv2d(16, 16, 3, padding=1)], (8, 16, 32, 32)),
}
NAMES = {
    "both": ("both", "both, eager with checkpoint", "both, eager without recompute"),
    "forward": ("forward", "forward, eager"),
    "backward": ("backward", "backward, eager without recompute"),
}


def _opened(case: Case, names: Sequence[str], stack: ExitStack) -> Opened:
    torch.manual_seed(0)
    found = candidates(case.layers(), torch.randn(case.shape))
    return {name: found[name] for name in names}, None


def _comparison(name: str, case: Case, what: str, sampled: bool) -> Comparison:
    names = NAMES[what]
    title = f"program of {name}, {what}"
    return Comparison(title, names, partial(_opened, case, names), calls=case.calls, sampled=sampled)


COMPARISONS = [
    *(_comparison(name, case, what, what == "both") for name, case in STAGES.items() for what in NAMES),
    *(_comparison(name, case, "both", sampled=False) for name, case in OPERATORS.items()),
]


def main() -> None:
    report_comparisons(globals(), in_us=True)
