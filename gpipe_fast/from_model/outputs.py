"""What a model returns, put together from what its micro-batches return."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpipe_fast.from_model.dataflow import CannotCut, Counted, Device, Nested, Owned, Ref, Slice
from gpipe_fast.from_model.shares import Shares
from gpipe_fast.from_model.sizes import at_sizes, batch_dims
from gpipe_fast.torch_private import pytree

LOSSES = ("exact", "per-microbatch")


@dataclass(frozen=True)
class Output:
    """A tensor that a model returns.

    Attributes:
        ref: the number of the value.
        dim: the dimension along which micro-batches are concatenated; None if there is none.
        kind: of a value without one, ``'share'`` if those of micro-batches add up, ``'whole'`` if each
            micro-batch computes that of the mini-batch; None if all micro-batches have the same.
    """

    ref: int
    dim: int | None
    kind: str | None


def model_outputs(shares: Shares, names: Sequence[str], loss: str) -> dict[int, Output]:
    """Returns the tensors that a model returns, by the numbers of their values.

    Args:
        shares: the calls of the model.
        names: the name of each leaf of what the model returns.
        loss: ``'exact'``, or ``'per-microbatch'`` to average values over micro-batches.

    Raises:
        CannotCut: a tensor follows from micro-batches in no known way.
    """
    found: dict[int, Output] = {}
    for name, leaf in zip(names, shares.flow.result.leaves, strict=True):
        if isinstance(leaf, Ref) and leaf.index not in found:
            output = _output(shares, name, leaf.index, loss)
            if output is not None:
                found[leaf.index] = output
        elif isinstance(leaf, Owned):
            raise CannotCut(f"output {name} is a parameter or buffer of the model; read it from the model")
    return found


def _output(shares: Shares, name: str, ref: int, loss: str) -> Output | None:
    value, why = shares.flow.values[ref], shares.refused.get(ref)
    for size in value.shape:
        if isinstance(size, Counted):
            raise CannotCut(f"output {name} has a size that depends on elements, at {size.place}")
    dims = batch_dims(value)
    if len(dims) == 1 and why is None:
        return Output(ref, dims[0], None)
    if dims and loss == "per-microbatch":
        return None
    if len(dims) > 1:
        raise CannotCut(
            f"output {name} compares samples: its dimensions {dims} follow the batch size, so no micro-batch "
            "has all of it; pass loss='per-microbatch' to GPipe.from_model to get None in its place, and "
            "compute it from the model's other outputs"
        )
    if dims:
        raise CannotCut(
            f"output {name} has a dimension of size {value.shape[dims[0]]}, where B is the batch size, and "
            f"{why}; return a dimension for the batch alone, or pass loss='per-microbatch' to "
            "GPipe.from_model to get None in its place"
        )
    if why is not None:
        raise CannotCut(
            f"output {name} of a batch does not follow from those of its micro-batches: {why}. Pass "
            "loss='per-microbatch' to GPipe.from_model to average it over micro-batches, or compute it from "
            "the model's other outputs"
        )
    return Output(ref, None, shares.kinds.get(ref))


def put_together(
    result: Nested,
    outputs: Sequence[Output],
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
) -> Any:
    """Returns what the model returns for the whole mini-batch.

    Args:
        result: what the model returned when it was recorded.
        outputs: the tensors in it.
        tensors: each of them, concatenated over micro-batches along the first dimension.
        sizes: the sizes of the mini-batch that numbers of the record follow.
    """
    found: dict[int, Tensor] = {}
    for output, tensor in zip(outputs, tensors, strict=True):
        if output.dim is not None:
            found[output.ref] = tensor.movedim(0, output.dim) if output.dim else tensor
        else:
            found[output.ref] = functools.reduce(torch.add, tensor) if output.kind == "share" else tensor[0]
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
