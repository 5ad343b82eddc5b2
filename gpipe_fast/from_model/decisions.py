"""What a forward reads from the elements of its inputs, and decides by.

It is computed in each call from the inputs of each micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast.from_model.dataflow import Dataflow, Decision, Nested, Owned, Ref
from gpipe_fast.from_model.evaluate import Evaluation, Unknown, refuse_reading
from gpipe_fast.from_model.sizes import Differs


def decides_alike(
    flow: Dataflow,
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    device: torch.device,
    may_read: bool,
) -> bool:
    """Returns whether forward decides by the elements of tensors as it did in a capture.

    Args:
        flow: the capture.
        tensors: the input tensors of a micro-batch.
        sizes: its sizes.
        device: the device of the computation.
        may_read: whether all tensors of modules are in this process.
    """
    read = _read_with_data if may_read else refuse_reading

    def holds(decision: Decision) -> bool:
        # Later calls may change what was read.
        before = dataclasses.replace(flow, calls=flow.calls[: decision.position])
        evaluation = Evaluation(before, known_inputs(tensors), sizes, device, read=read)
        return bool(evaluation.call(decision.target, decision.arguments) == decision.answer)

    with torch.no_grad():
        return all(map(holds, flow.decisions))


def decide_by(
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    device: torch.device,
    may_read: bool,
    opened: Container[nn.Module],
) -> Any:
    """Returns a function that reads from tensors what forward reads from its inputs."""

    def decide(target: Any, arguments: Nested, flow: Dataflow, own: Callable[[Owned], Tensor]) -> Any:
        known = known_inputs(tensors)

        def answer(draw: Any) -> Any:
            def read(owned: Owned) -> Tensor:
                if owned.owner not in opened and owned.name in owned.owner._buffers:
                    raise Unknown(f"{owned.name!r} of a {type(owned.owner).__name__}, which may change it")
                return _with_data(own(owned)) if may_read else refuse_reading(owned)

            evaluation = Evaluation(flow, known, sizes, device, draw=draw, read=read)
            return evaluation.call(target, arguments)

        with torch.no_grad():
            try:
                return answer(None)
            except Unknown as unknown:
                reason = unknown
            extremes: list[Any] = []
            if _is_compared_draw(flow, arguments):  # as by layerdrop
                extremes = [answer(_constant_draw(flow, number)) for number in (0.0, 1 - 2**-24)]
        if len(extremes) == 2 and extremes[0] == extremes[1]:
            return extremes[0]
        raise Unknown(str(reason))

    return decide


def _is_compared_draw(flow: Dataflow, arguments: Nested) -> bool:
    """Returns whether a value is one random number in [0, 1) that is compared with a constant."""
    producers = flow.producers()

    def maker(leaves: Sequence[Any]) -> Any:
        refs = [leaf.index for leaf in leaves if isinstance(leaf, Ref)]
        owned = any(isinstance(leaf, Owned) for leaf in leaves)
        return (
            flow.calls[producers[refs[0]]] if len(refs) == 1 and not owned and refs[0] in producers else None
        )

    comparison = maker(arguments.leaves)
    if comparison is None or getattr(comparison.target, "__name__", "").strip("_") not in _COMPARISONS:
        return False
    draw = maker(comparison.arguments.leaves)
    return (
        draw is not None and draw.target is torch.rand and not flow.values[draw.result.leaves[0].index].shape
    )


_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal"})


def _constant_draw(flow: Dataflow, number: float) -> Any:
    def draw(call: Any) -> Tensor:
        if call.target is not torch.rand:
            raise Unknown("random numbers")
        value = flow.values[next(call.result.refs())]
        return torch.full(value.shape, number, dtype=value.dtype, device="cpu")

    return draw


def repeated(answers: Sequence[Any]) -> Any:
    """Returns a function that repeats what forward has read before."""
    left = iter(answers)

    def decide(*_: Any) -> Any:
        try:
            return next(left)
        except StopIteration:
            raise Differs from None

    return decide


def known_inputs(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """Returns the inputs of a call by their numbers, with elements."""
    return dict(enumerate(map(_with_data, tensors)))


def _read_with_data(owned: Owned) -> Tensor:
    return _with_data(owned.read())


def _with_data(tensor: Tensor) -> Tensor:
    """Returns a tensor that has elements: ones in place of a meta tensor."""
    return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu") if tensor.is_meta else tensor
