"""Counts the bytes that operators and launches of kernels read and write, on meta tensors.

An operator reads its inputs and writes its outputs, each storage once; views and allocations move nothing. A
kernel reads its arguments, except tensors that are allocated but not yet written: it writes these, and the
tensors that it updates in place.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.gpu.case import KernelCase
from gpipe_fast.kernels import launch
from gpipe_fast.lower.work import NOT_READ_ARGUMENT, OVERWRITES
from gpipe_fast.strides import span

aten = torch.ops.aten
ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


class Traffic(TorchDispatchMode):
    """A dispatch mode that counts the bytes that operators and launches read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read = self.written = 0
        self._unwritten: dict[int, Tensor] = {}  # tensors by storage, allocated but not yet written
        self._keep_alive: list[Any] = []  # keeps tensors alive: the address of a freed storage may be reused

    @property
    def moved(self) -> int:
        """The bytes read and written, added."""
        return self.read + self.written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given, results = _tensors((args, kwargs)), _tensors(found)
        self._keep_alive += [given, results]
        if func.overloadpacket in ALLOCATIONS:
            self._unwritten.update((_storage(t), t) for t in results)
            return found
        changed = _mutated(func, args, kwargs or {})
        storages = {_storage(t) for t in given}
        views = results and not changed and all(_storage(t) in storages for t in results)
        if not func.is_view and not views and func.namespace != "prim":
            unread = changed if func.overloadpacket in OVERWRITES else []
            if func.overloadpacket in NOT_READ_ARGUMENT:
                unread = [args[NOT_READ_ARGUMENT[func.overloadpacket]]]
            reads = [t for t in given if not _contains(t, unread)]
            self._count(reads, [*(t for t in results if not _contains(t, changed)), *changed])
        return found

    def launched(self, tensors: Sequence[Tensor], overwritten: Sequence[Tensor]) -> None:
        """Counts the bytes of a kernel launch with these tensor arguments."""
        in_place = {_storage(t) for t in overwritten}
        self._keep_alive.append(tensors)
        reads = [t for t in tensors if _storage(t) not in self._unwritten]
        writes = [t for t in tensors if _storage(t) in self._unwritten or _storage(t) in in_place]
        self._count(reads, writes)

    def _count(self, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        writes = list(writes)
        self.read += _bytes(reads)
        self.written += _bytes(writes)
        for tensor in writes:
            self._unwritten.pop(_storage(tensor), None)

    @contextlib.contextmanager
    def counting_launches(self, overwritten: Sequence[Tensor] = ()) -> Iterator[None]:
        """Counts kernel launches instead of executing them."""

        def wrap(kernel: Any) -> Any:
            return _FakeKernel(lambda *args, **constants: self.launched(_tensors(args), overwritten))

        with self, mock.patch.object(launch, "wrap_triton", wrap):
            yield


class _FakeKernel:
    """A function with the call syntax of a kernel: ``kernel[grid](arguments)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return self._function


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _contains(tensor: Tensor, tensors: Iterable[Tensor]) -> bool:
    return any(tensor is other for other in tensors)


def _mutated(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors that an operator writes in place."""
    arguments = func._schema.arguments
    given = [*zip(arguments, args, strict=False), *((a, kwargs.get(a.name)) for a in arguments[len(args) :])]
    return _tensors([value for a, value in given if a.alias_info is not None and a.alias_info.is_write])


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the tensors. Counts overlapping views of a storage once."""
    shown: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            shown.setdefault(_storage(tensor), []).append(tensor)
    return sum(min(sum(t.numel() * t.itemsize for t in views), _span(views)) for views in shown.values())


def _span(views: Sequence[Tensor]) -> int:
    """Returns the bytes in the union of the views' extents, for views of one storage."""
    length = end = 0
    for view in sorted(views, key=lambda view: view.storage_offset() * view.itemsize):
        begin = int(view.storage_offset()) * view.itemsize
        behind = begin + span(view.shape, view.stride()) * view.itemsize
        length += max(0, behind - max(begin, end))
        end = max(end, behind)
    return length


def unfused_bytes(case: KernelCase, elements: int, dtype: torch.dtype) -> int:
    """Returns the bytes that PyTorch's operators read and write."""
    inputs = case.inputs(elements, dtype, "meta")
    gradients = case.gradients(inputs)
    traffic = Traffic()
    with traffic:
        case.unfused(inputs, gradients)
    return traffic.moved


@functools.lru_cache
def fused_bytes(case: KernelCase, elements: int, dtype: torch.dtype) -> int:
    """Returns the bytes that our kernels read and write."""
    inputs = case.inputs(elements, dtype, "meta")
    gradients = case.gradients(inputs)
    if case.moved is not None:
        return case.moved(inputs, gradients)
    traffic = Traffic()
    given = [*inputs, *gradients]
    with traffic.counting_launches([given[index] for index in case.overwritten]):
        case.launched(*inputs, *gradients)
    return traffic.moved
