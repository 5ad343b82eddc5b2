"""The ahead-of-time tracer: the joint export, the descriptors of its ports, and patches for a trace.

Read in PyTorch 2.11.0 and 2.14.1.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing


def patched_reserve_size() -> contextlib.AbstractContextManager[Any]:
    """Makes the size of cuDNN's reserve space for batch norms 0 in a block; programs accept any size.

    cuDNN reports the size only for integer sizes, not for symbols, and only on a GPU. CPU-only builds may
    lack the function.
    """
    name = "_get_cudnn_batch_norm_reserve_space_size"
    # A mock would keep the tensors that it is called with.
    return mock.patch.object(torch._C, name, lambda input, training: 0, create=True)  # noqa: PT008


def fused_attention_allowed() -> contextlib.AbstractContextManager[Any]:
    """Lets nn.MultiheadAttention call its fused operator, which it does not if it detects a trace."""
    module = torch.nn.modules.activation
    return mock.patch.object(module, "_is_make_fx_tracing", lambda: False)  # noqa: PT008


def backward_without_autocast() -> contextlib.AbstractContextManager[None]:
    """Traces the backward outside of the autocast region of the forward, in a block."""
    patched: contextlib.AbstractContextManager[None] = functorch_config.patch(backward_pass_autocast="off")
    return patched


def gradient_placements(joint: Any) -> dict[str, tuple[Any, ...]]:
    """Returns how the gradient of each sharded parameter is placed, by its name in the exported module."""
    meta = joint._aot_graph_capture.maybe_subclass_meta
    gradients = [] if meta is None else meta.grad_input_metas or []
    *_, result = joint.graph_module.graph.nodes
    descriptors = list(result.meta["desc"])
    position = len(descriptors) - sum(getattr(each, "arg_count", 1) for each in gradients)
    found: dict[str, tuple[Any, ...]] = {}
    for each in gradients:
        match descriptors[position]:
            case SubclassGetAttrAOTOutput(base=GradAOTOutput(grad_of=ParamAOTInput() as parameter)):
                found[parameter.target] = tuple(each.original_subclass.placements)
        position += getattr(each, "arg_count", 1)
    return found
