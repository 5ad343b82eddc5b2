"""Buffers of layers in Python as they were: put back after a failure, and for a second run of the layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


class NotedBuffer(NamedTuple):
    """A buffer at some time, or a parameter that the forward writes."""

    module: nn.Module
    name: str
    buffer: Tensor
    copy: Tensor

    def is_changed(self) -> bool:
        """Whether it is another tensor, or has other elements."""
        # Batch norm writes its statistics without telling their version counters.
        replaced = getattr(self.module, self.name, None) is not self.buffer
        return replaced or not torch.equal(self.buffer, self.copy)

    def put_back(self) -> None:
        """Makes it the module's again, with its elements."""
        if getattr(self.module, self.name, None) is not self.buffer:
            setattr(self.module, self.name, self.buffer)
        with torch.no_grad():
            self.buffer.copy_(self.copy)


def buffers_now(layers: Sequence[nn.Module]) -> list[NotedBuffer]:
    """The buffers as they are, and what embeddings with ``max_norm`` shorten in their forward."""
    return [
        NotedBuffer(module, name, tensor, tensor.detach().clone())
        for layer in layers
        for module in layer.modules()
        for name, tensor in (*module._buffers.items(), *_shortened(module).items())
        if tensor is not None
    ]


def _shortened(module: nn.Module) -> dict[str, nn.Parameter | None]:
    is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return module._parameters if is_table and module.max_norm is not None else {}


@contextlib.contextmanager
def as_they_were(buffers: Sequence[NotedBuffer]) -> Iterator[None]:
    """Lets buffers be for a block what a forward found, unnoticed by autograd."""
    names = [(noted.module, noted.name) for noted in buffers]
    now = [NotedBuffer(m, n, b, b.detach().clone()) for m, n in names if (b := getattr(m, n)) is not None]
    tensors = {id(noted.buffer): noted.buffer for noted in (*buffers, *now)}
    with _unsafe_preserve_version_counter(tuple(tensors.values())):
        try:
            for noted in buffers:
                noted.put_back()
            yield
        finally:
            for noted in now:
                noted.put_back()
