"""Autograd's engine, hooks on saved tensors, and version counters."""

from __future__ import annotations

from typing import Any

import torch

from gpipe_fast.torch_private.autograd import (
    engine,
    keeps_graph,
    preserve_version_counter,
    set_engine,
    top_saved_tensors_hooks,
)


class Engine:
    """Counts the backwards that Python starts."""

    def __init__(self, original: Any) -> None:
        self.original, self.count = original, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.original.run_backward(*args, **kwargs)


def test_the_engine_is_replaced() -> None:
    original = engine()
    own = Engine(original)
    set_engine(own)
    try:
        x = torch.ones(2, requires_grad=True)
        assert torch.autograd.grad((2 * x).sum(), x)[0].tolist() == [2, 2]
    finally:
        set_engine(original)
    assert own.count == 1
    assert engine() is original


def test_a_backward_knows_whether_its_graph_is_kept() -> None:
    found = []
    x = torch.ones(2, requires_grad=True)
    y = x * x
    y.register_hook(lambda gradient: found.append(keeps_graph()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert found == [True, False]


def test_a_version_is_preserved() -> None:
    x = torch.ones(2)
    with preserve_version_counter(x):
        x.add_(1)
    assert x._version == 0


def test_the_innermost_hooks_are_found() -> None:
    def pack(x: torch.Tensor) -> torch.Tensor:
        return x

    assert top_saved_tensors_hooks(True) is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert top_saved_tensors_hooks(True)[0] is pack
    assert top_saved_tensors_hooks(True) is None
