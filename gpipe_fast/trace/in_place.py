"""Operators in place, which a trace replaces by functional ones: here, with the same bits and layouts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from gpipe_fast.torch_private.fake_tensors import FunctionalTensorMode
from gpipe_fast.trace.fake import RealLayouts

aten = torch.ops.aten


@contextlib.contextmanager
def exact_changes(mode: RealLayouts) -> Iterator[None]:
    """Makes functionalization follow changes in place exactly, in a block.

    To an expanded tensor, it adds the difference of the new and the old value, and it sets to zero what no
    window of ``unfold`` contains: both become other views here. A tensor that is no view, but has gaps, such
    as a gate of a GRU cell, gets another layout.

    Args:
        mode: the fake mode; of the trace.
    """
    functionalize = FunctionalTensorMode.__torch_dispatch__

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changes_sizes = torch.Tag.inplace_view in func.tags  # such as transpose_, which has other strides
        outer, mode.in_place = mode.in_place, "" if changes_sizes else func._schema.name
        try:
            found = functionalize(self, func, types, args, kwargs)
        finally:
            mode.in_place = outer
        if found is NotImplemented:  # a tensor of another class, as a DTensor, dispatches first
            return found
        if func is aten.expand.default and found.numel() == args[0].numel():
            return functionalize(self, aten.view.default, types, (args[0], found.shape))
        if func is aten.unfold.default:
            where = found.shape, found.stride(), found.storage_offset()
            return functionalize(self, aten.as_strided.default, types, (args[0], *where))
        return found

    with mock.patch.object(FunctionalTensorMode, "__torch_dispatch__", dispatch):
        yield
