"""Captures of single layers: their graph, their guards, and the layers that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.utils._sympy.functions import Mod

from gpipe_fast import GPipe
from gpipe_fast.trace.dynamo import Captured, Refused, _assume, capture, scope_of

X = torch.linspace(-1, 1, 12).view(4, 3)
FACTOR = 2.0


class Scaled(nn.Module):
    """Reads an attribute, a global variable and a Python number."""

    def __init__(self, scale: float = 3.0) -> None:
        super().__init__()
        self.linear, self.scale, self.unused = nn.Linear(3, 3), scale, 0

    def forward(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
        y: Tensor = self.linear(x) * self.scale * FACTOR + shift
        return y


def run(captured: Captured, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    value, stashed = captured.run(layer, args, kwargs, (), lambda constant: constant)
    assert stashed == ()
    return value


def test_a_captured_layer_computes_the_same_and_serves_equal_layers() -> None:
    layer, other = Scaled(), Scaled()
    captured = capture(layer, (X,), {"shift": 1.0})
    assert torch.equal(run(captured, layer, X, shift=1.0), layer(X, shift=1.0))
    assert torch.equal(run(captured, other, 2 * X, shift=1.0), other(2 * X, shift=1.0))


def test_guards_notice_what_the_forward_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Scaled()
    guards = capture(layer, (X,), {}).guards
    assert guards.layer(scope_of(layer))
    assert guards.ambient(scope_of(layer))
    assert guards.layer(scope_of(Scaled()))
    assert not guards.layer(scope_of(Scaled(4.0)))
    layer.unused = 1
    assert guards.layer(scope_of(layer))
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert not guards.ambient(scope_of(layer))


@pytest.mark.parametrize("view", ["bucket", "transposed", "expanded", "whole"])
def test_gradients_that_are_views_are_no_obstacle_and_stay(view: str) -> None:
    """Such as those of DistributedDataParallel with gradient_as_bucket_view=True."""
    layer, buckets = Scaled(), torch.zeros(20)
    makes = {
        "bucket": lambda p: buckets[5 : 5 + p.numel()].view_as(p),
        "transposed": lambda p: torch.zeros(p.shape[::-1]).permute(*range(p.dim())[::-1]),
        "expanded": lambda p: torch.zeros(()).expand(p.shape),
        "whole": lambda p: torch.zeros_like(p).view_as(p),
    }
    for parameter in layer.parameters():
        parameter.grad = makes[view](parameter)
    gradients = [p.grad for p in layer.parameters()]
    pipe = GPipe(nn.Sequential(layer), [1], chunks=2, backend="aten")
    with torch.no_grad():
        assert torch.equal(pipe(X), layer(X))
    assert all(p.grad is g for p, g in zip(layer.parameters(), gradients, strict=True))


def test_a_condition_with_a_remainder_of_a_product() -> None:
    """SymPy writes Mod(a, b * c) as ``a % b*c``."""
    a, b = sympy.symbols("a b", integer=True, positive=True)
    condition = sympy.Ne(Mod(a, a * (b - 1)), 0)
    _assume([condition], {a: 9, b: 5})
    with pytest.raises(Refused, match="a condition on sizes does not hold"):
        _assume([condition], {a: 9, b: 2})
