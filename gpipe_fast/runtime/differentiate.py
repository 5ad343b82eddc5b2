"""From gradients of the roots of an autograd graph to those of its sources, in the thread that asks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

Found = Sequence[Tensor | None]


def differentiate(
    roots: Sequence[tuple[Tensor, Tensor]], sources: list[Tensor], retain: bool, reentrant: bool
) -> Found:
    """Gradients of the sources, None where there is none.

    Args:
        roots: tensors and their gradients.
        sources: what to differentiate by.
        retain: whether the graph may be needed again.
        reentrant: whether it has reentrant checkpoints.
    """
    outputs, gradients = [root for root, _ in roots], [gradient for _, gradient in roots]
    with _in_this_thread(roots):
        if reentrant:
            return _backward(outputs, gradients, sources, retain)
        return torch.autograd.grad(outputs, sources, gradients, retain_graph=retain, allow_unused=True)


def _in_this_thread(roots: Iterable[tuple[Tensor, Tensor]]) -> AbstractContextManager[Any]:
    """Autograd gives what is on a GPU to that GPU's thread, where the pipeline's backward may be waiting."""
    of_host = all(root.device.type == "cpu" for root, _ in roots)
    return torch.autograd.set_multithreading_enabled(of_host and torch._C._is_multithreading_enabled())


def _backward(roots: list[Tensor], gradients: list[Tensor], sources: list[Tensor], retain: bool) -> Found:
    """What reentrant checkpoints want instead: they add to ``grad`` themselves."""
    before = [source.grad for source in sources]
    try:
        for source in sources:
            source.grad = None
        torch.autograd.backward(roots, gradients, retain_graph=retain)
        return [source.grad for source in sources]
    finally:
        for source, gradient in zip(sources, before, strict=True):
            source.grad = gradient


@contextlib.contextmanager
def without_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Hooks on parameters see the whole mini-batch's gradient, not each micro-batch's."""
    hooked = [(p, p._backward_hooks) for p in parameters if p._backward_hooks]
    try:
        for parameter, _ in hooked:
            parameter._backward_hooks = None
        yield
    finally:
        for parameter, hooks in hooked:
            parameter._backward_hooks = hooks
