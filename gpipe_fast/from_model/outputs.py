"""What a model returns, put together from what its micro-batches return."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpipe_fast.from_model.dataflow import CannotCut, Counted, Dataflow, Device, Nested, Owned, Ref, Slice
from gpipe_fast.from_model.loss_rules import Rule, combine, concatenates, find_rule
from gpipe_fast.from_model.sizes import at_sizes, batch_dims
from gpipe_fast.torch_private import pytree

LOSSES = ("exact", "per-microbatch")


@dataclass(frozen=True)
class Output:
    """A tensor that a model returns.

    Attributes:
        ref: the number of the value.
        dim: the dimension along which micro-batches are concatenated; None if there is none.
        rule: how values without a batch dimension are combined; None if all micro-batches have the same.
    """

    ref: int
    dim: int | None
    rule: Rule | None


def model_outputs(
    flow: Dataflow, names: Sequence[str], split: Collection[int], loss: str, static_sizes: Sequence[int]
) -> dict[int, Output]:
    """Returns the tensors that a model returns, by the numbers of their values.

    Args:
        flow: the record.
        names: the name of each leaf of what the model returns.
        split: the inputs that are split into micro-batches.
        loss: ``'exact'``, or ``'per-microbatch'`` to average values over micro-batches.
        static_sizes: the sizes besides the batch size that numbers follow.

    Raises:
        CannotCut: a tensor follows from micro-batches in no known way.
    """
    found: dict[int, Output] = {}
    for name, leaf in zip(names, flow.result.leaves, strict=True):
        if isinstance(leaf, Ref) and leaf.index not in found:
            output = _output(flow, name, leaf.index, split, loss, static_sizes)
            if output is not None:
                found[leaf.index] = output
        elif isinstance(leaf, Owned):
            raise CannotCut(f"output {name} is a parameter or buffer of the model; read it from the model")
    return found


def _output(
    flow: Dataflow, name: str, ref: int, split: Collection[int], loss: str, static_sizes: Sequence[int]
) -> Output | None:
    for size in flow.values[ref].shape:
        if isinstance(size, Counted):
            raise CannotCut(f"output {name} has a size that depends on elements, at {size.place}")
    dims = batch_dims(flow.values[ref])
    if len(dims) == 1:
        size = flow.values[ref].shape[dims[0]]
        if size.is_batch or concatenates(flow, ref, dims[0], static_sizes):
            return Output(ref, dims[0], None)
        if loss == "per-microbatch":
            return None
        raise CannotCut(
            f"output {name} has a dimension of size {size}, where B is the batch size, and the samples of "
            "micro-batches would come in another order; return a dimension for the batch alone, or pass "
            "loss='per-microbatch' to GPipe.from_model to get None in its place"
        )
    if dims:
        if loss == "per-microbatch":
            return None
        raise CannotCut(
            f"output {name} compares samples: its dimensions {dims} follow the batch size, so no micro-batch "
            "has all of it; pass loss='per-microbatch' to GPipe.from_model to get None in its place, and "
            "compute it from the model's other outputs"
        )
    if not flow.depends_on([ref], split):
        return Output(ref, None, None)
    counted = _counted(flow, ref)
    if counted is not None and loss == "exact":
        raise CannotCut(
            f"output {name} is computed from a tensor whose size depends on elements, at {counted.place}; "
            "compute with masks, as in (x * mask).sum() / mask.sum(), or pass loss='per-microbatch' to "
            "GPipe.from_model to average it over micro-batches"
        )
    rule = None if counted is not None else find_rule(flow, ref, static_sizes)
    if rule is not None and (rule.ref is None or _is_known(flow, rule.ref)):
        return Output(ref, None, rule)
    if loss == "per-microbatch":
        return Output(ref, None, Rule("samples"))
    raise CannotCut(
        f"output {name} of a batch does not follow from those of its micro-batches; pass "
        "loss='per-microbatch' to GPipe.from_model to average it over micro-batches, or compute it from the "
        "model's other outputs"
    )


def _counted(flow: Dataflow, ref: int) -> Counted | None:
    """Returns a size on which a value depends by functions alone, and which depends on elements, if any."""
    wanted, seen = [ref], set[int]()
    while wanted:
        value = wanted.pop()
        found = next((x for x in flow.values[value].shape if isinstance(x, Counted)), None)
        if found is not None:
            return found
        if value not in seen:
            seen.add(value)
            for call in flow.calls:
                if not call.is_module and value in (*call.result.refs(), *call.mutates):
                    wanted += call.arguments.refs()
    return None


def _is_known(flow: Dataflow, ref: int) -> bool:
    """Returns whether a value follows from the inputs by functions alone."""
    producers = flow.producers()
    wanted = [ref]
    while wanted:
        index = producers.get(wanted.pop())
        if index is not None:
            if flow.calls[index].is_module or flow.calls[index].draws:
                return False
            wanted += flow.calls[index].arguments.refs()
    return True


def put_together(
    result: Nested,
    outputs: Sequence[Output],
    tensors: Sequence[Tensor],
    weights: Sequence[Sequence[float]],
    sizes: Sequence[int],
) -> Any:
    """Returns what the model returns for the whole mini-batch.

    Args:
        result: what the model returned when it was recorded.
        outputs: the tensors in it.
        tensors: each of them, concatenated over micro-batches along the first dimension.
        weights: for each output, those of the micro-batches by its rule.
        sizes: the sizes of the mini-batch that numbers of the record follow.
    """
    found: dict[int, Tensor] = {}
    for output, tensor, of_parts in zip(outputs, tensors, weights, strict=True):
        if output.dim is not None:
            found[output.ref] = tensor.movedim(0, output.dim) if output.dim else tensor
        elif output.rule is None:
            found[output.ref] = tensor[0]
        else:
            found[output.ref] = combine(tensor, of_parts)
    device = tensors[0].device if tensors else torch.device("cpu")

    def leaf_of(leaf: Any) -> Any:
        leaf = at_sizes(leaf, sizes)
        if isinstance(leaf, Ref):
            return found.get(leaf.index)
        if isinstance(leaf, Slice):
            return slice(leaf.start, leaf.stop, leaf.step)
        return device if isinstance(leaf, Device) else leaf

    return result.build(leaf_of)


def leaf_names(value: Any) -> list[str]:
    """Returns a name for each leaf of a nested value, as ``loss`` or ``[0]``."""
    return [name or "tensor" for name in _names(value)]


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) or hasattr(value, "_fields"):
        items = value.items() if isinstance(value, Mapping) else zip(value._fields, value, strict=True)
        yield from (f"{key}{name}" for key, each in items for name in _names(each))
    elif isinstance(value, (tuple, list)):
        yield from (f"[{i}]{name}" for i, each in enumerate(value) for name in _names(each))
    else:
        yield from ([""] if pytree.tree_leaves(value) == [value] else map(str, pytree.tree_leaves(value)))
