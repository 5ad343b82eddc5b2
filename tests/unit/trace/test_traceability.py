"""Checks of layers before a trace: modules that trace unfaithfully are refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from gpipe_fast.trace.traceability import (
    Untraceable,
    UsesForeignTensor,
    check_graph,
    check_initialized,
    check_layers,
    layer_of,
)


def hooked() -> nn.Module:
    layer = nn.Linear(2, 2)

    def own_hook(module: nn.Module, inputs: object, output: object) -> None:
        pass

    layer.register_forward_hook(own_hook)
    return layer


def sparse() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_buffer("table", torch.eye(2).to_sparse())
    return layer


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "recurrent": (lambda: nn.LSTM(2, 2), "LSTM 1: recurrent layers are not bitwise equal when traced"),
    "max_norm": (lambda: nn.Embedding(3, 2, max_norm=1.0), "Embedding 1: max_norm changes a parameter"),
    "sparse gradients": (
        lambda: nn.EmbeddingBag(3, 2, sparse=True),
        "EmbeddingBag 1: it has sparse gradients",
    ),
    "TorchScript": (
        lambda: torch.jit.script(nn.Linear(2, 2)),
        "RecursiveScriptModule 1: a TorchScript module is opaque",
    ),
    "hook": (hooked, "Linear 1: the hook own_hook would run only in the trace"),
    "sparse buffer": (sparse, "Linear 1: table is a Tensor of layout torch.sparse_coo"),
}


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("name", REFUSED)
def test_a_module_that_traces_unfaithfully_is_named(name: str) -> None:
    make, reason = REFUSED[name]
    layers = [nn.Linear(2, 2), nn.Sequential(nn.ReLU(), make())]
    found = check_layers(layers)
    assert isinstance(found, Untraceable)
    assert found.layer == 1
    assert found.reason.startswith(reason)
    assert not found.is_fatal


def test_other_modules_are_accepted() -> None:
    assert check_layers([nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Embedding(3, 2), nn.Dropout()]) is None


def test_a_lazy_module_cannot_run_at_all() -> None:
    found = check_initialized([nn.ReLU(), nn.LazyLinear(2)])
    assert isinstance(found, Untraceable)
    assert (found.layer, found.is_fatal) == (1, True)
    assert found.reason.startswith("LazyLinear: weight is not initialised yet; run one batch")
    assert check_initialized([nn.Linear(2, 2)]) is None


aten = torch.ops.aten


def graph_of(target: object, *arguments: object, constant: object = None) -> fx.GraphModule:
    """Returns a graph of one call, annotated with layer 3, of an input and, if given, of a constant."""
    graph, root = fx.Graph(), nn.Module()
    operands: tuple[object, ...] = (graph.placeholder("x"), *arguments)
    if constant is not None:
        setattr(root, "constant", constant)  # noqa: B010 a tensor or a module
        operands = (graph.get_attr("constant"), *operands[1:])
    node = graph.call_function(target, operands)  # type: ignore[arg-type]
    for each in graph.nodes:
        each.meta["custom"] = {"layer": 3}
    graph.output(node)
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize(
    ("target", "arguments", "reason"),
    [
        (aten.rand_like.default, (), "aten.rand_like.default draws random numbers outside a layer's forward"),
        (aten.add_.Tensor, (1,), "aten.add_.Tensor changes a tensor that is neither a buffer nor created"),
        (aten._assert_async.default, (), "aten._assert_async.default returns nothing"),
    ],
)
def test_operators_that_a_program_would_compute_wrongly_are_refused(
    target: object, arguments: tuple[object, ...], reason: str
) -> None:
    found = check_graph(graph_of(target, *arguments))
    assert isinstance(found, Untraceable)
    assert found.layer == 3
    assert found.reason.startswith(reason)


def test_parameters_of_others_are_refused_and_constants_are_not() -> None:
    assert check_graph(graph_of(aten.sin.default)) is None
    assert check_graph(graph_of(aten.sin.default, constant=torch.ones(2))) is None
    foreign: Tensor = nn.Parameter(torch.ones(2), requires_grad=False)
    assert isinstance(check_graph(graph_of(aten.sin.default, constant=foreign)), UsesForeignTensor)


def test_the_layer_of_a_node() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    assert layer_of(node) is None
    node.meta["custom"] = {"layer": 2}
    assert layer_of(node) == 2
