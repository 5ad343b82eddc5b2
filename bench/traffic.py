"""Bytes that the backward of a recomputed segment reads and writes: fused, and by PyTorch's operators.

Counted on tensors without data. An operator reads its inputs and writes its outputs, each storage once; views
and allocations move nothing. A kernel reads the tensors that it is given, but for those that were allocated
and not yet written: it writes these, and those in whose place it computes.
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

from bench.case import DTYPES, Case
from bench.families import all_cases
from bench.measure import report
from gpipe_fast.kernels import launch
from gpipe_fast.strides import span

ELEMENTS = 1 << 24

aten = torch.ops.aten
ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
# These write in place what they do not read.
OVERWRITES = {aten.copy_, aten.fill_, aten.zero_, aten.bernoulli_, aten.normal_, aten.uniform_}
# Of the argument at this index these read an element of each row at most.
UNREAD = {aten.nll_loss_forward: 0, aten.nll_loss_backward: 1}


class Traffic(TorchDispatchMode):
    """Adds up the bytes that operators and launches read and write while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read = self.written = 0
        self._blank: dict[int, Tensor] = {}  # by storage, allocated and not yet written
        self._kept: list[Any] = []  # a storage's address tells it from others only as long as it lives

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given, results = _tensors((args, kwargs)), _tensors(found)
        self._kept += [given, results]
        if func.overloadpacket in ALLOCATIONS:
            self._blank.update((_storage(t), t) for t in results)
            return found
        changed = _changed(func, args, kwargs or {})
        storages = {_storage(t) for t in given}
        views = results and not changed and all(_storage(t) in storages for t in results)
        if not func.is_view and not views and func.namespace != "prim":
            unread = changed if func.overloadpacket in OVERWRITES else []
            if func.overloadpacket in UNREAD:
                unread = [args[UNREAD[func.overloadpacket]]]
            reads = [t for t in given if not _in(t, unread)]
            self._count(reads, [*(t for t in results if not _in(t, changed)), *changed])
        return found

    def launched(self, tensors: Sequence[Tensor], overwritten: Sequence[Tensor]) -> None:
        """Counts what a kernel is given."""
        in_place = {_storage(t) for t in overwritten}
        self._kept.append(tensors)
        reads = [t for t in tensors if _storage(t) not in self._blank]
        writes = [t for t in tensors if _storage(t) in self._blank or _storage(t) in in_place]
        self._count(reads, writes)

    def _count(self, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        writes = list(writes)
        self.read += _bytes(reads)
        self.written += _bytes(writes)
        for tensor in writes:
            self._blank.pop(_storage(tensor), None)

    @contextlib.contextmanager
    def counting_launches(self, overwritten: Sequence[Tensor] = ()) -> Iterator[None]:
        """Counts launches instead of making them."""

        def wrap(kernel: Any) -> Any:
            return _Grids(lambda *args, **constants: self.launched(_tensors(args), overwritten))

        with self, mock.patch.object(launch, "wrap_triton", wrap):
            yield


class _Grids:
    """A kernel that is a function: ``kernel[grid](arguments)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return self._function


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _in(tensor: Tensor, tensors: Iterable[Tensor]) -> bool:
    return any(tensor is other for other in tensors)


def _changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """What an operator writes in place."""
    arguments = func._schema.arguments
    given = [*zip(arguments, args, strict=False), *((a, kwargs.get(a.name)) for a in arguments[len(args) :])]
    return _tensors([value for a, value in given if a.alias_info is not None and a.alias_info.is_write])


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of the parts of storages that tensors show, none more than once."""
    shown: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            shown.setdefault(_storage(tensor), []).append(tensor)
    return sum(min(sum(t.numel() * t.itemsize for t in views), _span(views)) for views in shown.values())


def _span(views: Sequence[Tensor]) -> int:
    """Bytes of one storage between the first and last element of any view."""
    length = end = 0
    for view in sorted(views, key=lambda view: view.storage_offset() * view.itemsize):
        begin = int(view.storage_offset()) * view.itemsize
        behind = begin + span(view.shape, view.stride()) * view.itemsize
        length += max(0, behind - max(begin, end))
        end = max(end, behind)
    return length


def unfused_bytes(case: Case, elements: int, dtype: torch.dtype) -> int:
    """Read and written by PyTorch's operators."""
    inputs = case.inputs(elements, dtype, "meta")
    gradients = case.gradients(inputs)
    traffic = Traffic()
    with traffic:
        case.unfused(inputs, gradients)
    return traffic.moved


@functools.lru_cache
def fused_bytes(case: Case, elements: int, dtype: torch.dtype) -> int:
    """Read and written by ours."""
    inputs = case.inputs(elements, dtype, "meta")
    gradients = case.gradients(inputs)
    if case.moved is not None:
        return case.moved(inputs, gradients)
    traffic = Traffic()
    given = [*inputs, *gradients]
    with traffic.counting_launches([given[index] for index in case.overwritten]):
        case.launched(*inputs, *gradients)
    return traffic.moved


def row(case: Case, dtype: str, elements: int = ELEMENTS) -> list[object]:
    """Of the table: bytes per element, and the share that is saved."""
    unfused, fused = (count(case, elements, DTYPES[dtype]) for count in (unfused_bytes, fused_bytes))
    return [case.name, dtype, unfused / elements, fused / elements, f"{1 - fused / unfused:.0%}"]


def main() -> None:
    report(
        "traffic",
        "Bytes of the backward of a recomputed segment",
        ["function", "dtype", "unfused, bytes per element", "fused", "saving"],
        [row(case, dtype) for case in all_cases().values() for dtype in DTYPES],
        f"Counted, not measured: what operators and kernels read and write of {ELEMENTS >> 20} M elements. "
        "Unfused: PyTorch computes the forward again, and then the gradients, one operator after the other. "
        "Fused: one kernel, partial sums and their addition too; dropout and rotary embedding are launched "
        "for the forward and the backward. Of many tensors ours saves launches, not bytes; of cross-entropy "
        "with the linear layer memory: all logits never exist.\n",
    )


if __name__ == "__main__":
    main()
