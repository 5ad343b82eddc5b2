"""What the processes of a pipeline must have in common in a call, as text, and how two of them differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gpipe_fast.layers.structure import layer_title
from gpipe_fast.runtime.plan import PlannedCall
from gpipe_fast.runtime.planner import Call
from gpipe_fast.runtime.stage import Stage, TensorSpec

# By argument or other name, what a process has.
Description = dict[str, str]


def describe_model(call: Call, plan: PlannedCall, stages: Sequence[Stage]) -> Description:
    """Returns what replicas must have in common: the gradients that they sum, but not their batch sizes."""
    order, modes = call.order, call.state.modes
    layers = [layer for stage in stages for layer in stage.layers]
    found = {
        "the version of PyTorch": str(torch.__version__),
        "the method": "a call of the model" if order is None else "step or evaluate",
        "torch.is_grad_enabled()": str(modes.grad),
        "torch.autocast": str(modes.autocast),
        "torch.get_default_dtype()": str(modes.default_dtype),
        "balance": str([len(stage.layers) for stage in stages]),
        "the type of devices": stages[0].device.type,
        "grad_dtype": str(stages[0].options.grad_dtype),
    }
    for index, layer in enumerate(layers):
        tensors = [
            f"{name} {_text(TensorSpec.of(t, t.requires_grad))}"
            for name, t in (*layer.named_parameters(), *layer.named_buffers())
        ]
        mode = "training" if layer.training else "eval"
        found[layer_title(index, layer)] = f"{mode} mode, {', '.join(tensors) or 'no tensors'}"
    found["the tied parameters"] = str(stages[0].options.ties)
    for index, stage in enumerate(plan.compiled[0] if plan.compiled else ()):
        found[f"the parameters with gradients of stage {index}"] = str(
            sorted(stage.parameters_with_gradients())
        )
    return found


def describe_inputs(call: Call, plan: PlannedCall, stages: Sequence[Stage]) -> Description:
    """Returns what the shards of a replica must have in common: all but what depends on their parts."""
    found = {
        "chunks": str(call.chunks),
        "batch_dim": str(call.inputs.dims),
        "the number of inputs": str(len(call.inputs.tensors)),
        "the nesting of the inputs": str(call.inputs.structure),
    }
    for index, tensor in enumerate(call.inputs.tensors):
        found[f"input {index}"] = _text(TensorSpec.of(tensor, tensor.requires_grad))
    for index, tensor in enumerate(call.given):
        found[f"tensor {index} of the target"] = _text(TensorSpec.of(tensor, False))
    found["checkpoint"] = str(call.saved_fractions)
    found["the schedule"] = plan.schedule.csv()
    return describe_model(call, plan, stages) | found


def describe_call(call: Call, plan: PlannedCall, stages: Sequence[Stage]) -> Description:
    """Returns everything on which the transfers between stages depend."""
    found = describe_inputs(call, plan, stages)
    for m, pipeline in enumerate(plan.compiled or ()):
        for index, stage in enumerate(pipeline):
            which = f"of stage {index}, {'last' if m else 'first'} micro-batch"
            outputs = stage.outputs
            found[f"the outputs {which}"] = f"{list(map(_text, outputs.tensors))}, {outputs.skips}"
            found[f"the gradients of inputs {which}"] = str(stage.traced.ports.input_gradient_layouts())
    return found


def describe_code(plan: PlannedCall) -> Description:
    """Returns what the stages of a new plan compute, as far as traces of other sizes do not hide it."""
    operators = [stage.traced.operators() for stage in (plan.compiled or [()])[0]]
    return {f"the operators of stage {i}": digest_of(own) for i, own in enumerate(operators) if own}


def describe_collectives(call: Call, plan: PlannedCall, own_stages: Iterable[int]) -> Description:
    """Returns the collectives of each action, which all ranks of a group have to run in the same order.

    The order of actions is that of the schedule, which is a part of `describe_inputs`.
    """
    found = {}
    defers = plan.is_step and plan.schedule.defers_weights
    for which, pipeline in zip(("first", "last"), plan.compiled or (), strict=False):
        for index in own_stages:
            for fraction in dict.fromkeys(call.saved_fractions[index]):
                traced = pipeline[index].traced
                for kind, program in zip("FBW", traced.lower(fraction, defers).all_programs(), strict=False):
                    for number, text in enumerate(program.written().collectives()):
                        where = f"{index}{kind}, {which} micro-batch, {fraction} saved"
                        found[f"collective {number} of {where}"] = text
                traced.drop_graph()
    return found


def digest_of(description: Any) -> str:
    """Returns a short text that differs for different descriptions."""
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()[:16]


def difference(ours: Description, theirs: Description) -> str:
    """Returns a sentence that names what differs first."""
    for name in (*ours, *theirs):
        if ours.get(name) != theirs.get(name):
            own, other = (each.get(name, "nothing") for each in (ours, theirs))
            return f"{name}: here {shortened(own)}, there {shortened(other)}"
    return "the versions of gpipe_fast"


def _text(spec: TensorSpec) -> str:
    grad = ", requires a gradient" if spec.requires_grad else ""
    dtype = str(spec.dtype).removeprefix("torch.")
    return f"{dtype}{list(spec.shape)}, strides {list(spec.strides)}{grad}"


def shortened(text: str) -> str:
    """Returns a text that fits in an error message."""
    return text if len(text) <= 400 else f"{text[:400]}..."
