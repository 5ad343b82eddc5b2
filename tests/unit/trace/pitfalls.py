"""Helpers of the pitfall tests: traces without a pipeline, and one-line models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from gpipe_fast import GPipe
from gpipe_fast.trace import trace
from gpipe_fast.trace.gradient_layouts import GradientLayouts
from gpipe_fast.trace.joint_graph import GraphRole, JointGraph, buffers_of, parameters_of
from gpipe_fast.trace.traceability import Untraceable
from tests.reference import loop_step, pipeline_step, unequal


def wrong_results(model: nn.Sequential, x: Tensor, budget: float = 0.0, balance: Any = None) -> list[str]:
    """Returns the names of tensors that a pipeline of four micro-batches computes wrongly."""
    pipe = GPipe(model, balance or [len(model)], chunks=4)
    return unequal(pipeline_step(pipe, x, budget), loop_step(model, x, 4))


def traced(*layers: nn.Module, x: Tensor, gradient_layouts: GradientLayouts = ()) -> JointGraph:
    joint = trace.trace(list(layers), [x], gradient_layouts)
    assert isinstance(joint, JointGraph), joint
    return joint


def refusal_reason(*layers: nn.Module, x: Tensor) -> str:
    joint = trace.trace(list(layers), [x])
    assert isinstance(joint, Untraceable), "the layers were traced"
    return joint.reason


def run_joint(joint: JointGraph, layers: list[nn.Module], x: Tensor, *tangents: Tensor) -> dict[Any, Tensor]:
    """Runs a joint graph eagerly, without checking or coercing strides, and returns all outputs by port."""
    inputs = {
        GraphRole.PARAMETER: parameters_of(layers),
        GraphRole.BUFFER: buffers_of(layers),
        GraphRole.KEY: [torch.zeros(3, dtype=torch.int64)],
        GraphRole.INPUT: [x],
        GraphRole.TANGENT: tangents,
    }
    interpreter = fx.Interpreter(joint.module, garbage_collect_values=False)
    with torch.no_grad():
        interpreter.run(*(inputs[p.role][p.index].detach() for p, _ in joint.inputs))
    return {(port.role, port.index): interpreter.env[node] for port, node in joint.outputs}


def linear(seed: int = 0, width: int = 6) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(width, width)


def batch(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(8, *(shape or (6,)), generator=torch.Generator().manual_seed(seed))
