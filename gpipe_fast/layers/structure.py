"""Nested values as flat tensors and a structure: model arguments, outputs, and stage boundaries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_fast.strides import span
from gpipe_fast.torch_private import pytree

# Types allowed beside tensors: all are immutable.
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)


@dataclass(frozen=True)
class Constant:
    """A value beside tensors that is passed on unchanged.

    Constants are equal if their type and text are, so 1 differs from True, and NaN equals NaN.

    Attributes:
        kind: the type of the value.
        text: the ``repr`` of the value.
        value: the value.
    """

    kind: type
    text: str
    value: Any = field(compare=False)


@dataclass(frozen=True)
class Structure:
    """The nesting of tensors, and the constants beside them.

    Attributes:
        spec: nested tuples, lists, dicts and named tuples, as PyTorch's pytree flattens them.
        leaves: constants and tensor indices, in order; an index occurs twice if the tensor does.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Constant | int, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.spec, self.leaves))

    def __hash__(self) -> int:
        """Returns the hash, computed once: every call looks up a signature by it."""
        return self._hash

    def __str__(self) -> str:
        """Returns the value's string, with ``...`` for each tensor."""
        return str(self.build([_Placeholder()] * len(self.leaves)))

    @property
    def num_tensors(self) -> int:
        """The number of tensors, if none occurs twice."""
        return sum(isinstance(leaf, int) for leaf in self.leaves)

    def number(self, index: int) -> str:
        """Returns the text of a leaf that is an integer or a float; "" for another leaf."""
        leaf = self.leaves[index]
        return leaf.text if isinstance(leaf, Constant) and leaf.kind in (int, float) else ""

    def build(self, tensors: Sequence[Any]) -> Any:
        """Returns the nested value with these tensors."""
        return pytree.tree_unflatten(
            [tensors[leaf] if isinstance(leaf, int) else leaf.value for leaf in self.leaves], self.spec
        )

    def build_unaliased(self, tensors: Sequence[Tensor]) -> Any:
        """Returns the nested value with these tensors; a tensor that occurs again is replaced by a copy."""
        seen: set[int] = set()
        leaves: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, int):
                leaves.append(tensors[leaf].clone() if leaf in seen else tensors[leaf])
                seen.add(leaf)
            else:
                leaves.append(leaf.value)
        return pytree.tree_unflatten(leaves, self.spec)


def changing_number(now: Structure, before: Iterable[Structure]) -> tuple[str, int]:
    """Returns the number beside tensors that had most other values before, and how many other values it had.

    Args:
        now: the structure of a call's arguments.
        before: those of earlier calls, of which those count that differ from ``now`` in numbers alone.

    Returns:
        The number as text, and how many other values it had; ("", 0) if none had another value.
    """
    values: dict[int, set[str]] = {}
    for other in before:
        differ = [i for i, (a, b) in enumerate(zip(now.leaves, other.leaves, strict=False)) if a != b]
        numbers = [other.number(i) for i in differ if now.number(i)]
        if other.spec == now.spec and all(numbers) and len(numbers) == len(differ):
            for index, number in zip(differ, numbers, strict=True):
                values.setdefault(index, set()).add(number)
    found = max(values, key=lambda index: len(values[index]), default=None)
    return ("", 0) if found is None else (now.number(found), len(values[found]))


class _Placeholder:
    def __repr__(self) -> str:
        return "..."


def flatten(value: object, *, deduplicate: bool = False) -> tuple[list[Tensor], Structure]:
    """Flattens a value into tensors and a structure; ``structure.build(tensors)`` is the inverse.

    Args:
        value: a nested value.
        deduplicate: whether to list a tensor that occurs several times only once. The rebuilt value then
            contains one tensor, whose uses accumulate their gradients as in the original value.

    Raises:
        TypeError: the value contains a leaf that is neither a tensor nor a constant.
    """
    leaves, spec = pytree.tree_flatten(value)
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}
    found: list[Constant | int] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            found.append(_constant(leaf))
            continue
        if not deduplicate or id(leaf) not in numbers:
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


def tuple_structure(count: int) -> Structure:
    """Returns the structure of a tuple of `count` tensors."""
    return flatten(tuple(torch.empty(0) for _ in range(count)))[1]


# The most recently created structures; C++ compares structures by identity.
_canonical: OrderedDict[Structure, Structure] = OrderedDict()
_CANONICAL_LIMIT = 1024


def canonical(structure: Structure) -> Structure:
    """Returns the canonical object among equal structures, if it is one of the latest `_CANONICAL_LIMIT`."""
    if structure == ONE_TENSOR:
        return ONE_TENSOR
    found = _canonical.setdefault(structure, structure)
    while len(_canonical) > _CANONICAL_LIMIT:
        _canonical.popitem(last=False)
    return found


# The batch dimension: one for all tensors, or one for each tensor that is split.
BatchDim = int | tuple[int, ...]


class LayerSequence(nn.Module):
    """A module whose children are layers that run one after the other, as in a ``Sequential``.

    Attributes:
        balance: the number of layers of each partition.
        devices: the device of each partition.
        batch_dim: the dimension along which inputs are split: one for all tensors, or one for each tensor.
        threads_per_stage: the number of intra-op threads of each stage; None for a share of the caller's.
    """

    balance: list[int]
    devices: list[torch.device]
    batch_dim: BatchDim
    threads_per_stage: int | None

    def __len__(self) -> int:
        """Returns the number of layers."""
        return len(self._modules)


def threads_of(module: nn.Sequential | LayerSequence) -> int:
    """Returns the number of intra-op threads with which a layer of a module runs."""
    if not isinstance(module, LayerSequence):
        return torch.get_num_threads()
    return stage_threads(module.threads_per_stage, len(module.balance))


def stage_threads(setting: int | None, num_stages: int) -> int:
    """Returns the number of intra-op threads of each stage: the setting, or a share of the caller's.

    Args:
        setting: ``threads_per_stage``.
        num_stages: the number of stages of this process.
    """
    return setting or max(1, torch.get_num_threads() // max(1, num_stages))


class CallArguments(NamedTuple):
    """The arguments of a call that is not just one positional argument."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments_of(value: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """Returns the arguments for a layer: a value, or those that a `CallArguments` holds."""
    return (value.args, value.kwargs) if isinstance(value, CallArguments) else ((value,), {})


def call_unpacked(function: Any, value: Any) -> Any:
    """Calls a function with a value, or with the arguments that a `CallArguments` holds."""
    args, kwargs = arguments_of(value)
    return function(*args, **kwargs)


class Replicated:
    """A value that every micro-batch gets whole; created by `replicate`."""

    def __init__(self, value: object) -> None:
        self.value = value


def replicate(value: object) -> Any:
    """Marks an input, or a part of an input, that is not split: every micro-batch gets it whole.

    ::

        model((x, gpipe_fast.replicate(mask)))

    The gradient of a replicated tensor is the sum of its gradients over micro-batches.

    Args:
        value: a tensor, or a nested value with tensors.

    Returns:
        A wrapper to pass to a `GPipe` in place of the value.
    """
    return Replicated(value)


class BatchDims(NamedTuple):
    """The dimensions along which a mini-batch is split into micro-batches and its outputs concatenated.

    Attributes:
        inputs: the dimension of each tensor; None for a tensor that every micro-batch gets whole.
        outputs: the dimension of all outputs.
    """

    inputs: tuple[int | None, ...]
    outputs: int = 0

    def batch_size(self, tensors: Sequence[Tensor]) -> int:
        """Returns the number of samples: the size of the first tensor that is split."""
        return next(x.size(d) for x, d in zip(tensors, self.inputs, strict=True) if d is not None)

    def split(self, tensors: Sequence[Tensor], chunks: int) -> list[tuple[Tensor, ...]]:
        """Returns the tensors of each micro-batch."""
        parts = [None if d is None else x.chunk(chunks, d) for x, d in zip(tensors, self.inputs, strict=True)]
        number = next(len(part) for part in parts if part is not None)
        columns = (part or (x,) * number for part, x in zip(parts, tensors, strict=True))
        return list(zip(*columns, strict=True))


_BATCH_FIRST = BatchDims((0,))


class Inputs(NamedTuple):
    """The flattened arguments of a call.

    Attributes:
        tensors: all tensors, in order.
        structure: their nesting.
        dims: the dimensions along which they are split.
    """

    tensors: list[Tensor]
    structure: Structure
    dims: BatchDims

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """Returns the arguments with these tensors in place of the original ones."""
        marked = [Replicated(x) if d is None else x for x, d in zip(tensors, self.dims.inputs, strict=True)]
        return self.structure.build(marked)

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        return self.dims.batch_size(self.tensors)

    def with_memory(self, device: torch.device) -> Inputs:
        """Returns these arguments with zeros on a device in place of meta tensors."""

        def zeros(tensor: Tensor) -> Tensor:
            if not tensor.is_meta or tensor.layout is not torch.strided:
                return tensor
            memory = torch.zeros(span(tensor.shape, tensor.stride()), dtype=tensor.dtype, device=device)
            return memory.as_strided(tensor.shape, tensor.stride()).requires_grad_(tensor.requires_grad)

        return self._replace(tensors=[*map(zeros, self.tensors)])

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: BatchDim = 0) -> Inputs:
        """Flattens the arguments of a call.

        Args:
            args: the positional arguments.
            kwargs: the keyword arguments.
            batch_dim: one dimension for all tensors, or one for each tensor that is split, in order; outputs
                have the first of them.

        Raises:
            TypeError: an argument contains a leaf that is neither a tensor nor a constant.
            ValueError: the length of ``batch_dim`` is not the number of tensors to split.
        """
        if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs:
            return cls(
                [args[0]], ONE_TENSOR, _BATCH_FIRST if batch_dim == 0 else _make_dims([False], batch_dim)
            )
        value = args[0] if len(args) == 1 and not kwargs else CallArguments(args, kwargs)
        leaves, spec = pytree.tree_flatten(value, is_leaf=lambda part: isinstance(part, Replicated))
        unwrapped = [leaf.value if isinstance(leaf, Replicated) else leaf for leaf in leaves]
        tensors, structure = flatten(pytree.tree_unflatten(unwrapped, spec))
        replicated = [
            isinstance(leaf, Replicated)
            for leaf, part in zip(leaves, unwrapped, strict=True)
            for tensor in pytree.tree_leaves(part)
            if isinstance(tensor, Tensor)
        ]
        return cls(tensors, structure, _make_dims(replicated, batch_dim))


def _make_dims(replicated: Sequence[bool], batch_dim: BatchDim) -> BatchDims:
    if isinstance(batch_dim, int):
        return BatchDims(tuple(None if whole else batch_dim for whole in replicated), batch_dim)
    if len(batch_dim) != replicated.count(False):
        raise ValueError(
            "batch_dim must have one entry for each input tensor that is split into micro-batches; expected "
            f"length {replicated.count(False)}, got length {len(batch_dim)}: {batch_dim}"
        )
    left = iter(batch_dim)
    return BatchDims(tuple(None if whole else next(left) for whole in replicated), batch_dim[0])


def layer_title(position: int | str, layer: nn.Module) -> str:
    """Returns ``layer 3 (Linear)`` for a layer's position, ``layer 'head' (Linear)`` for its name."""
    return f"layer {position!r} ({type(layer).__name__})"
