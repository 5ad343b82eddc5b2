"""Inputs of a call: unsupported ones are refused, and keyword arguments reach the first layer."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, replicate
from tests.models import features, mlp

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.filterwarnings("ignore:.*(CSR|quantiz|nested)")
def test_unsupported_inputs_are_refused() -> None:
    model, x = GPipe(mlp(), [2, 3], chunks=2), features()
    parts = [torch.ones(2, 6), torch.ones(3, 6)]
    for message, inputs in (
        ("got a tensor of layout torch.sparse_coo; pass x.to_dense()", x.to_sparse()),
        ("got a tensor of layout torch.sparse_csr", (x.to_sparse_csr(), 3)),
        ("got a quantized tensor; pass x.dequantize()", torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
        ("got a nested tensor; pass torch.nested.to_padded_tensor", torch.nested.nested_tensor(parts)),
        ("got a nested tensor", torch.nested.nested_tensor(parts, layout=torch.jagged)),
    ):
        with pytest.raises(TypeError, match=re.escape(message)):
            model(inputs)
    with pytest.raises(TypeError, match=r"model\(x=...\) passes its arguments to layer 0 \(Linear\)"):
        model(x=x)
    assert model(x).shape == (8, 4)


class Sums(nn.Module):
    """A layer of a graph: adds to each node what its edges bring."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, edge_index[1], self.linear(x)[edge_index[0]])


class Graph(nn.Module):
    """A model of nodes and edges, as those of PyTorch Geometric."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(Sums() for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for each in self.convolutions:
            x = each(x, edge_index)
        return x


@pytest.mark.parametrize("is_sequence", [True, False])
@pytest.mark.filterwarnings("ignore:.*stages idle")
def test_nodes_of_a_graph_cannot_be_split(is_sequence: bool) -> None:
    """Also if the edges are passed whole, as the error of unequal sizes says of other inputs."""
    x, edges = features(8), torch.tensor([[0, 1, 7], [1, 2, 0]])
    with pytest.raises(IndexError, match=r"edge_index of a graph.*these cannot be split; pass whole graphs"):
        if is_sequence:
            GPipe(nn.Sequential(Sums()), [1], chunks=2)(x, replicate(edges))
        else:
            GPipe.from_model(Graph(), (x, edges), balance=[1, 1], devices=["cpu"] * 2, chunks=2)(x, edges)


class TakesKeyword(nn.Module):
    def forward(self, x: Tensor, *, scale: int = 1) -> Tensor:
        return x * scale


def test_keyword_arguments_reach_the_first_layer() -> None:
    model, x = GPipe(nn.Sequential(TakesKeyword(), nn.ReLU()), [1, 1], chunks=2), features()
    assert torch.equal(model(x, scale=2), (x * 2).relu())
    assert torch.equal(model(x=x), x.relu())
    hook = lambda _, args, kwargs: (args, {"scale": kwargs["s"]})  # noqa: E731
    model[0].register_forward_pre_hook(hook, with_kwargs=True)
    with pytest.warns(UserWarning, match="runs in Python"):
        assert torch.equal(model(x, s=3), (x * 3).relu())
