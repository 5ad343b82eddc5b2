"""Aliases: every view leads to the value whose memory it shares."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from gpipe_fast.lower.alias import source_of

aten = torch.ops.aten


def result_of(function: Callable[[Tensor], Tensor], *shape: int) -> tuple[fx.Node, fx.Node]:
    """Traces the function to a graph; returns the graph's placeholder and result."""
    module = make_fx(function, tracing_mode="fake")(torch.zeros(*shape))
    *_, output = module.graph.nodes
    (placeholder,) = module.graph.find_nodes(op="placeholder")
    (result,) = output.all_input_nodes
    return placeholder, result


VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "view": (lambda x: x.view(24), 0),
    "transpose": (lambda x: x.t(), 0),
    "permute, unsqueeze, squeeze": (lambda x: x.permute(1, 0).unsqueeze(0).squeeze(0), 0),
    "expand": (lambda x: x.unsqueeze(1).expand(4, 3, 6), 0),
    "detach": (lambda x: x.detach(), 0),
    "select": (lambda x: x[2], 12),
    "select of select": (lambda x: x[2][3], 15),
    "narrow": (lambda x: x.narrow(1, 2, 3), 2),
    "slice with a step": (lambda x: x[1::2, 1::3], 7),
    "split": (lambda x: x.split(2, 1)[2], 4),
    "unbind": (lambda x: x.unbind(1)[5], 5),
    "split of transposed": (lambda x: x.t().split(2)[1].t(), 2),
    "diagonal": (lambda x: x.diagonal(1), 1),
    "as_strided": (lambda x: x.as_strided([2, 2], [1, 6], 7), 7),
    "clone of the same strides": (lambda x: x[1:].clone(), 6),
    "chain": (lambda x: x.view(2, 2, 6)[1].t().clone().narrow(0, 1, 2).detach(), 13),
}


@pytest.mark.parametrize(("function", "offset"), VIEWS.values(), ids=VIEWS.keys())
def test_views_lead_to_their_base(function: Callable[[Tensor], Tensor], offset: int) -> None:
    placeholder, result = result_of(function, 4, 6)
    source = source_of(result)
    assert source.base is placeholder
    assert source.offset == offset
    # The elements are at this offset.
    x = torch.arange(24.0).view(4, 6)
    fake = result.meta["val"]
    assert torch.equal(x.as_strided(fake.shape, fake.stride(), source.offset), function(x))


NON_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "computed": lambda x: x + 0,
    "clone in other strides": lambda x: x.t().clone(memory_format=torch.contiguous_format),
    "another dtype": lambda x: x.to(torch.float64),
    "bits as another dtype": lambda x: x.view(torch.int32),
    "complex": lambda x: torch.view_as_complex(x.view(4, 3, 2)),
    "real part": lambda x: torch.complex(x, x).real,
    "index": lambda x: x[torch.tensor([0, 1])],
}


@pytest.mark.parametrize("function", NON_VIEWS.values(), ids=NON_VIEWS.keys())
def test_values_that_are_not_views_own_their_memory(function: Callable[[Tensor], Tensor]) -> None:
    placeholder, result = result_of(function, 4, 6)
    assert source_of(result).base is not placeholder
