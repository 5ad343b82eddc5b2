"""Gradients of the sources of an autograd graph, computed in the calling thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from gpipe_fast.runtime.undo import run_and_undo

Gradients = Sequence[Tensor | None]


def differentiate(
    roots: Sequence[tuple[Tensor, Tensor]], sources: list[Tensor], retain: bool, reentrant: bool
) -> Gradients:
    """Returns the gradients of the sources; None for a source that the roots do not depend on.

    Args:
        roots: tensors and their gradients.
        sources: tensors with respect to which to differentiate.
        retain: whether to keep the graph for another backward.
        reentrant: whether the graph contains reentrant checkpoints.
    """
    outputs, gradients = [root for root, _ in roots], [gradient for _, gradient in roots]
    with _in_calling_thread(roots):
        if reentrant:
            return _reentrant_backward(outputs, gradients, sources, retain)
        return torch.autograd.grad(outputs, sources, gradients, retain_graph=retain, allow_unused=True)


def _in_calling_thread(roots: Iterable[tuple[Tensor, Tensor]]) -> AbstractContextManager[Any]:
    """Disables autograd's GPU threads for a block: they may be waiting in the pipeline's backward."""
    all_on_cpu = all(root.device.type == "cpu" for root, _ in roots)
    return torch.autograd.set_multithreading_enabled(all_on_cpu and torch._C._is_multithreading_enabled())


def _reentrant_backward(
    roots: list[Tensor], gradients: list[Tensor], sources: list[Tensor], retain: bool
) -> Gradients:
    """Returns the gradients by ``backward()``, which reentrant checkpoints need: they add to ``grad``."""
    before = [source.grad for source in sources]
    try:
        for source in sources:
            source.grad = None
        torch.autograd.backward(roots, gradients, retain_graph=retain)
        return [source.grad for source in sources]
    finally:
        for source, gradient in zip(sources, before, strict=True):
            source.grad = gradient


def run_without_hooks(parameters: Iterable[Tensor], run: Callable[[], Gradients]) -> Gradients:
    """Returns what ``run`` returns without parameters' hooks.

    Hooks run on the mini-batch's gradient, not on a micro-batch's.
    """
    hooked = [(p, p._backward_hooks) for p in parameters if p._backward_hooks]

    def run_without() -> Gradients:
        for parameter, _ in hooked:
            parameter._backward_hooks = None
        return run()

    def undo() -> None:
        for parameter, hooks in hooked:
            parameter._backward_hooks = hooks

    return run_and_undo(run_without, undo)
