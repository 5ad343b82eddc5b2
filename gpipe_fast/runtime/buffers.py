"""Snapshots of the buffers of Python layers, restored after a failure and for a recompute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


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
        # Inference tensors may be written in inference mode only.
        with torch.inference_mode(self.buffer.is_inference()), torch.no_grad():
            self.buffer.copy_(self.copy)


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


@contextlib.contextmanager
def restored_buffers(buffers: Sequence[BufferSnapshot]) -> Iterator[None]:
    """Restores the snapshots for a block, without incrementing version counters that autograd checks."""
    names = [(snapshot.module, snapshot.name) for snapshot in buffers]
    current = [
        BufferSnapshot(m, n, b, b.detach().clone()) for m, n in names if (b := getattr(m, n)) is not None
    ]
    tensors = {id(snapshot.buffer): snapshot.buffer for snapshot in (*buffers, *current)}
    with _unsafe_preserve_version_counter(tuple(tensors.values())):
        try:
            for snapshot in buffers:
                snapshot.restore()
            yield
        finally:
            for snapshot in current:
                snapshot.restore()
