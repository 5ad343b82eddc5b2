"""One stage's programs, compared with eager autograd.

Backward recomputes the forward, then adds to the gradients of an earlier micro-batch. Outputs and gradients
are bitwise equal to eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.measure import alternate, report
from bench.models.gpt import blocks
from bench.models.mlp import mlp
from gpipe_fast._extension import Arena
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.split import StageGraph, split
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole, parameters_of
from gpipe_fast.trace.trace import trace
from gpipe_fast.trace.traceability import Untraceable

CPU = torch.device("cpu")
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
        native = program.build(Arena(), CPU)
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
    assert not isinstance(joint, Untraceable), joint
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
    stage, forward_graph, backward_graph = prepare(layers, input)
    ours = [stage.program(g) for g in (forward_graph, backward_graph)]
    check(stage, ours[0], ours[1])
    model, leaf = nn.Sequential(*layers), input.detach().requires_grad_()
    saved = model(leaf)

    def both() -> None:
        ours[0](True)
        ours[1](False)

    return {
        "forward": lambda: ours[0](True),
        "forward, eager": lambda: _without_grad(model, input),
        "backward": lambda: ours[1](False),
        "backward, eager without recompute": lambda: saved.backward(stage.tangent, retain_graph=True),
        "both": both,
        "both, eager with checkpoint": lambda: checkpoint(model, leaf, use_reentrant=False).backward(
            stage.tangent
        ),
        "both, eager without recompute": lambda: model(leaf).backward(stage.tangent),
    }


@torch.no_grad()
def _without_grad(model: nn.Module, input: Tensor) -> Tensor:
    result: Tensor = model(input)
    return result


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases = {
        "2 x (Linear(64, 64), ReLU), batch 8": (mlp(), torch.randn(8, 64), 60, 200),
        "2 GPT blocks of width 256, 2 x 128 tokens": (blocks(2), torch.randn(2, 128, 256), 40, 1),
    }
    rows = []
    for name, (layers, input, rounds, calls) in cases.items():
        timings = alternate(candidates(layers, input), rounds, calls)
        for what, timing in timings.items():
            ours = timings[what.split(",")[0]]
            rows.append([name, what, str(timing), ours.median / timing.median])
            name = ""
    report(globals(), ["stage", "what", "µs: median [p20, p80]", "ours / this"], rows)
