"""Nested values as tensors and a structure: what users pass and get, and what crosses between stages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# What may stand beside tensors: values that nobody can change.
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)


@dataclass(frozen=True)
class Constant:
    """A value beside tensors, passed on as it is.

    Attributes:
        kind: its type.
        text: what it reads like; by type and text constants are equal, so 1 is not True, and NaN is NaN.
        value: itself.
    """

    kind: type
    text: str
    value: Any = field(compare=False)


@dataclass(frozen=True)
class Structure:
    """How tensors are nested, and what stands beside them.

    Attributes:
        spec: tuples, lists, dicts and named tuples, as PyTorch flattens them.
        leaves: in order; a number is a tensor's, and stands twice where that tensor does.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Constant | int, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.spec, self.leaves))

    def __hash__(self) -> int:
        """Computed once: every call looks its signature up."""
        return self._hash

    def __str__(self) -> str:
        """The value, with tensors as three dots."""
        return str(self.build([_Dots()] * len(self.leaves)))

    def build(self, tensors: Sequence[Any]) -> Any:
        """The value with these tensors."""
        return pytree.tree_unflatten(
            [tensors[leaf] if isinstance(leaf, int) else leaf.value for leaf in self.leaves], self.spec
        )

    def build_apart(self, tensors: Sequence[Tensor]) -> Any:
        """The value with these tensors, but none twice: copies instead."""
        seen: set[int] = set()
        leaves: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, int):
                leaves.append(tensors[leaf].clone() if leaf in seen else tensors[leaf])
                seen.add(leaf)
            else:
                leaves.append(leaf.value)
        return pytree.tree_unflatten(leaves, self.spec)


class _Dots:
    def __repr__(self) -> str:
        return "..."


def flatten(value: object, *, once: bool = False) -> tuple[list[Tensor], Structure]:
    """Takes a value apart; ``structure.build(tensors)`` puts it together.

    Args:
        value: nested in whatever way.
        once: take a tensor that stands in several places once, so that whoever gets the value sees that it is
            one: the gradients of all its uses are then added up as if nothing lay between.

    Raises:
        TypeError: it holds what is neither a tensor nor a constant.
    """
    leaves, spec = pytree.tree_flatten(value)
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}
    found: list[Constant | int] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            found.append(_constant(leaf))
            continue
        if not once or id(leaf) not in numbers:
            numbers[id(leaf)] = len(tensors)
            tensors.append(leaf)
        found.append(numbers[id(leaf)])
    return tensors, Structure(spec, tuple(found))


def _constant(leaf: object) -> Constant:
    if not isinstance(leaf, _CONSTANTS):
        raise TypeError(
            f"expected Tensor, but got {type(leaf).__name__}; tensors may be nested in tuples, lists and "
            "dicts, beside None, bools, numbers and strings"
        )
    return Constant(type(leaf), repr(leaf), leaf)


_, ONE_TENSOR = flatten(torch.empty(0))


def tuple_of(count: int) -> Structure:
    """That of a tuple of so many tensors."""
    return flatten(tuple(torch.empty(0) for _ in range(count)))[1]


# Structures that C++ compares by identity, the latest.
_shared: OrderedDict[Structure, Structure] = OrderedDict()
_SHARED_LIMIT = 1024


def shared(structure: Structure) -> Structure:
    """The one object that stands for all equal ones, as far as it was asked for lately."""
    if structure == ONE_TENSOR:
        return ONE_TENSOR
    found = _shared.setdefault(structure, structure)
    while len(_shared) > _SHARED_LIMIT:
        _shared.popitem(last=False)
    return found


# The dimension of the batch: of all tensors, or of each that is cut.
BatchDim = int | tuple[int, ...]


class LayerSequence(nn.Module):
    """A module whose children are layers that run one after the other, as those of a ``Sequential`` do."""

    @property
    def batch_dim(self) -> BatchDim:
        """Along which dimension inputs are cut, or each of them is."""
        return 0

    def __len__(self) -> int:
        """The number of layers."""
        return len(self._modules)


class Call(NamedTuple):
    """The arguments of a call, where they are not one value alone."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(function: Any, value: Any) -> Any:
    """Calls with a value, or with the arguments that it stands for."""
    return function(*value.args, **value.kwargs) if isinstance(value, Call) else function(value)


class Replicated:
    """What every micro-batch gets as a whole; `replicate` makes it."""

    def __init__(self, value: object) -> None:
        self.value = value


def replicate(value: object) -> Any:
    """Marks an input, or a part of one, that is not cut: every micro-batch gets all of it.

    ::

        model((x, gpipe_fast.replicate(mask)))

    The gradient of a tensor in it is the sum over micro-batches.
    """
    return Replicated(value)


class Dims(NamedTuple):
    """Along which dimensions a mini-batch is cut into micro-batches, and joined again.

    Attributes:
        inputs: of each tensor; None for one that every micro-batch gets as a whole.
        outputs: of all outputs.
    """

    inputs: tuple[int | None, ...]
    outputs: int = 0

    def batch_size(self, tensors: Sequence[Tensor]) -> int:
        """The length of the first tensor that is cut."""
        return next(x.size(d) for x, d in zip(tensors, self.inputs, strict=True) if d is not None)

    def cut(self, tensors: Sequence[Tensor], chunks: int) -> list[tuple[Tensor, ...]]:
        """The tensors of each micro-batch."""
        parts = [None if d is None else x.chunk(chunks, d) for x, d in zip(tensors, self.inputs, strict=True)]
        number = next(len(part) for part in parts if part is not None)
        columns = (part or (x,) * number for part, x in zip(parts, tensors, strict=True))
        return list(zip(*columns, strict=True))


_FIRST = Dims((0,))


class Inputs(NamedTuple):
    """What a module is called with, taken apart.

    Attributes:
        tensors: in order.
        structure: how they are nested.
        dims: along which they are cut.
    """

    tensors: list[Tensor]
    structure: Structure
    dims: Dims

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """What would be taken apart into these tensors."""
        marked = [Replicated(x) if d is None else x for x, d in zip(tensors, self.dims.inputs, strict=True)]
        return self.structure.build(marked)

    @property
    def batch_size(self) -> int:
        """How many samples there are."""
        return self.dims.batch_size(self.tensors)

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: BatchDim = 0) -> Inputs:
        """Takes the arguments of a call apart.

        Args:
            args: of the call.
            kwargs: of the call.
            batch_dim: that of all tensors, or those of the ones that are cut, in order; outputs have the
                first of them.

        Raises:
            TypeError: there is something that is neither a tensor nor a constant.
            ValueError: ``batch_dim`` has not as many entries as there are tensors to cut.
        """
        if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs:
            return cls([args[0]], ONE_TENSOR, _FIRST if batch_dim == 0 else _dims([False], batch_dim))
        value = args[0] if len(args) == 1 and not kwargs else Call(args, kwargs)
        leaves, spec = pytree.tree_flatten(value, is_leaf=lambda part: isinstance(part, Replicated))
        bare = [leaf.value if isinstance(leaf, Replicated) else leaf for leaf in leaves]
        tensors, structure = flatten(pytree.tree_unflatten(bare, spec))
        replicated = [
            isinstance(leaf, Replicated)
            for leaf, part in zip(leaves, bare, strict=True)
            for tensor in pytree.tree_leaves(part)
            if isinstance(tensor, Tensor)
        ]
        return cls(tensors, structure, _dims(replicated, batch_dim))


def _dims(replicated: Sequence[bool], batch_dim: BatchDim) -> Dims:
    if isinstance(batch_dim, int):
        return Dims(tuple(None if whole else batch_dim for whole in replicated), batch_dim)
    if len(batch_dim) != replicated.count(False):
        raise ValueError(
            f"batch_dim has {len(batch_dim)} entries, one for each tensor of the input that is cut, but "
            f"{replicated.count(False)} are; got {batch_dim}"
        )
    left = iter(batch_dim)
    return Dims(tuple(None if whole else next(left) for whole in replicated), batch_dim[0])
