"""Captures of single layers: gradients that are no obstacle, and conditions on sizes."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import nn
from torch.utils._sympy.functions import Mod

from gpipe_fast import GPipe
from gpipe_fast.trace.dynamo import Refused, _assume

X = torch.linspace(-1, 1, 12).view(4, 3)


@pytest.mark.parametrize("view", ["bucket", "transposed", "expanded", "whole"])
def test_gradients_that_are_views_are_no_obstacle_and_stay(view: str) -> None:
    """Such as those of DistributedDataParallel with gradient_as_bucket_view=True."""
    layer, buckets = nn.Linear(3, 3), torch.zeros(20)
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
