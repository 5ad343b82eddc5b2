"""What an operator allocates on a GPU and frees again, such as the workspaces of libraries."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from gpipe_fast.lower.operator_examples import CANNOT_RUN, Spec, as_in_a_program, examples
from gpipe_fast.lower.program import Value
from gpipe_fast.lower.steps import Call, Ref, Step

# Matrix products: cuBLAS keeps its workspace, one for each thread and stream.
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_addmm_activation"))

# By everything that they depend on.
_known: dict[Hashable, int] = {}


def temporary_bytes(step: Step, values: Sequence[Value], device: torch.device) -> int:
    """Returns the sum of the bytes that a step allocates and frees again.

    Equal calls are measured once, alone. The sum is 0 on the CPU, where such memory is not counted; if the
    device is not there; for a matrix product, whose workspace stays; for a user's operator, which may have
    side effects; and if the operator cannot run alone. A product with a 4-bit weight dequantizes it on any
    device, but for few samples on a GPU, where it counts, too.

    Args:
        step: the step.
        values: those of its program.
        device: the device of the stage.
    """
    if not isinstance(step, Call):
        return 0
    if step.op.name() == "bitsandbytes::gemm_4bit":
        return _dequantized_bytes(step, values)
    if step.op.namespace != "aten":
        return 0
    if step.op.overloadpacket.__name__ in _PRODUCTS:
        return 0
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        return 0
    arguments = _specs(step.arguments, values)
    key = step.op, repr(arguments), device, torch.are_deterministic_algorithms_enabled()
    if key not in _known:
        _known[key] = _measured(step, arguments, device)
    return _known[key]


def _dequantized_bytes(product: Call, values: Sequence[Value]) -> int:
    activations, _, shape, *_ = product.arguments
    found: int = math.prod(shape) * values[activations.value].dtype.itemsize
    return found


def _specs(argument: Any, values: Sequence[Value]) -> Any:
    """Returns an argument with specs in the place of values."""
    if isinstance(argument, Ref):
        value = values[argument.value]
        return Spec(value.sizes, value.strides, value.dtype)
    if isinstance(argument, (list, tuple)):
        return [_specs(each, values) for each in argument]
    return argument


def _measured(call: Call, arguments: Sequence[Any], device: torch.device) -> int:
    def freed() -> int:
        found: int = torch.cuda.memory_stats(device).get("allocated_bytes.all.freed", 0)
        return found

    with as_in_a_program(), torch.cuda.device(device):
        try:
            args = examples(arguments, device)
            schema = zip(call.op._schema.arguments, args, strict=False)
            named = {argument.name: value for argument, value in schema if argument.kwarg_only}
            args = args[: len(args) - len(named)]  # those by name are the last
            call.op(*args, **named)  # a library may choose an algorithm, or allocate what it keeps
            before = freed()
            results = call.op(*args, **named)
            found = freed() - before
            del results
            return found
        except CANNOT_RUN:
            return 0
