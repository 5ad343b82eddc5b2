"""Snapshots of the buffers of Python layers, restored after a failure, for a recompute, and after Ctrl-C."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gpipe_fast.torch_private.autograd import preserve_version_counter

_Result = TypeVar("_Result")


class BufferSnapshot(NamedTuple):
    """A snapshot of a buffer, or of a parameter that the forward writes."""

    module: nn.Module
    name: str
    buffer: Tensor
    copy: Tensor

    def is_changed(self) -> bool:
        """Returns whether the module holds another tensor now, or the tensor has other elements."""
        # Batch norm writes its running statistics without incrementing their version counters.
        replaced = getattr(self.module, self.name, None) is not self.buffer
        return replaced or not torch.equal(self.buffer, self.copy)

    def restore(self) -> None:
        """Restores the tensor and its elements in the module."""
        if getattr(self.module, self.name, None) is not self.buffer:
            setattr(self.module, self.name, self.buffer)
        # Inference tensors may be written in inference mode only. Ctrl-C may keep the mode from being left.
        with torch.inference_mode() if self.buffer.is_inference() else contextlib.nullcontext():
            self.buffer.detach().copy_(self.copy)


def snapshot_buffers(layers: Sequence[nn.Module]) -> list[BufferSnapshot]:
    """Takes snapshots of all buffers, and of the tables that embeddings with ``max_norm`` renormalize."""
    return [
        BufferSnapshot(module, name, tensor, tensor.detach().clone())
        for layer in layers
        for module in layer.modules()
        for name, tensor in (*module._buffers.items(), *_renormalized_tables(module).items())
        if tensor is not None
    ]


def _renormalized_tables(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the parameters that an embedding with ``max_norm`` renormalizes in its forward."""
    is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return module._parameters if is_table and module.max_norm is not None else {}


def run_with_buffers(buffers: Sequence[BufferSnapshot], run: Callable[[], _Result]) -> _Result:
    """Returns what ``run`` returns with the snapshots' values, without incrementing version counters.

    Afterwards, the buffers are as they were.
    """
    names = [(snapshot.module, snapshot.name) for snapshot in buffers]
    current = [
        BufferSnapshot(m, n, b, b.detach().clone()) for m, n in names if (b := getattr(m, n)) is not None
    ]
    tensors = {id(snapshot.buffer): snapshot.buffer for snapshot in (*buffers, *current)}
    versions = preserve_version_counter(tuple(tensors.values()))  # autograd checks them

    def run_restored() -> _Result:
        for snapshot in buffers:
            snapshot.restore()
        return run()

    def undo() -> None:
        for snapshot in current:
            snapshot.restore()
        versions.__exit__()

    return run_and_undo(run_restored, undo)


def run_and_undo(run: Callable[[], _Result], undo: Callable[[], None]) -> _Result:
    """Returns what ``run`` returns, after ``undo`` has undone its changes.

    A worker receives Ctrl-C as a ``KeyboardInterrupt`` at any function call, also at that of a context
    manager's ``__exit__``, whose code then does not run. So no context manager is used here.

    Args:
        run: a function that may raise.
        undo: undoes all changes, however far ``run`` has come; it is called twice if Ctrl-C interrupts it.
    """
    try:
        return run()
    finally:
        try:
            undo()
        except KeyboardInterrupt:
            undo()
            raise
