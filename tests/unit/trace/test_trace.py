"""Traces of stages: every port of a joint graph is named, and an untraceable layer is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast.trace.joint_graph import GraphRole
from gpipe_fast.trace.layer_states import describe
from gpipe_fast.trace.trace import trace
from gpipe_fast.trace.traceability import Untraceable
from tests.stages import trace_joint

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.linspace(-1, 1, 16).view(4, 4)


class Apply(nn.Module):
    """Calls `function(self, x)`."""

    def __init__(self, function: Callable[[Any, Any], Any], **attributes: Any) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.__dict__.update(attributes)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def test_a_joint_graph_names_every_input_and_output_port() -> None:
    joint = trace_joint([nn.Linear(4, 4), nn.BatchNorm1d(4)], X.clone().requires_grad_())
    inputs = [str(port) for port, _ in joint.inputs]
    assert sorted(inputs) == [
        *("buffer[0]", "buffer[1]", "buffer[2]", "input[0]", "key[0]"),
        *("parameter[0]", "parameter[1]", "parameter[2]", "parameter[3]", "tangent[0]"),
    ]
    outputs = [str(port) for port, _ in joint.outputs]
    assert sorted(outputs) == [
        *("buffer[0]", "buffer[1]", "buffer[2]", "input_gradient[0]", "output[0]"),
        *(f"parameter_gradient[{i}]" for i in range(4)),
    ]
    assert joint.ports.differentiable_outputs() == {0}
    assert joint.of(GraphRole.INPUT_GRADIENT).keys() == {0}


def data_dependent(self: Any, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def keep_input(self: Any, x: Tensor) -> Tensor:
    self.last = x
    return x


def hooked_linear() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, args, output: None)
    return layer


def replace_buffer(self: Any, x: Tensor) -> Tensor:
    self.ema = self.ema * 0.9
    return x - self.ema


def with_buffer(layer: nn.Module, tensor: Tensor) -> nn.Module:
    layer.register_buffer("ema", tensor)
    return layer


LINEAR = nn.Linear(4, 4)
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "data-dependent": (lambda: Apply(data_dependent), "PyTorch cannot trace it: Data-dependent branching"),
    "number of a tensor": (
        lambda: Apply(lambda self, x: x * float(x.detach().sum() > 0)),
        "it computes with a number read from a tensor",
    ),
    "boolean index": (lambda: Apply(lambda self, x: x[x > 0]), "tracing raised"),
    "failing operator": (lambda: nn.Linear(5, 4), "tracing raised RuntimeError: a and b must have same"),
    "attribute set": (lambda: Apply(keep_input), "its forward changes self."),
    "list attribute changed": (
        lambda: Apply(lambda self, x: self.log.append(1) or x, log=[]),
        "its forward changes self.log",
    ),
    "recurrent": (lambda: nn.LSTM(4, 4), "LSTM: recurrent layers"),
    "nested recurrent": (lambda: nn.Sequential(nn.GRU(4, 4)), "GRU 0: recurrent layers"),
    "max_norm": (lambda: nn.Embedding(4, 4, max_norm=1.0), "max_norm changes a parameter"),
    "sparse gradients": (lambda: nn.Embedding(4, 4, sparse=True), "sparse gradients"),
    "sparse buffer": (
        lambda: with_buffer(nn.Linear(4, 4), torch.eye(2).to_sparse()),
        "ema is a Tensor of layout torch.sparse_coo",
    ),
    "buffer replaced": (lambda: with_buffer(Apply(replace_buffer), torch.ones(4)), "a side effect"),
    "forward hook": (hooked_linear, "the hook <lambda> would run only in the trace"),
    "lazy parameter": (lambda: nn.LazyLinear(4), "weight is not initialised yet"),
    "TorchScript": (lambda: torch.jit.script(nn.ReLU()), "a TorchScript module is opaque"),
    "parameter of another module": (
        lambda: Apply(lambda self, x: F.linear(x, self.others[0].weight), others=[LINEAR]),
        "requires a gradient but is not one of its parameters",
    ),
}


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize(("layer", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_an_untraceable_layer_is_refused_with_its_index_and_reason(
    layer: Callable[[], nn.Module], reason: str
) -> None:
    layers = [nn.Tanh(), layer()]
    before = [dict(vars(module)) for each in layers for module in each.modules()]
    with pytest.raises(Untraceable, match=re.escape(reason)) as caught:
        trace(layers, [X.clone().requires_grad_()])
    assert caught.value.layer == 1
    assert not caught.value.reason.endswith(".") or "tracing raised" in caught.value.reason
    assert before == [dict(vars(module)) for each in layers for module in each.modules()]


def test_no_kernel_runs_for_empty_tensors() -> None:
    # The backward of pooling has no check of its own, and reads out of bounds.
    signals = torch.empty(2, 0, 8).transpose(1, 2).requires_grad_()
    joint = trace_joint([nn.AdaptiveAvgPool1d(4)], signals)
    assert joint.ports.differentiable_outputs() == {0}


def test_a_refused_trace_leaves_no_tracing_tensor_in_a_nested_container() -> None:

    def keep_nested(self: Any, x: Tensor) -> Tensor:
        self.cache["k"].append(x)
        return x * 2

    layer = Apply(keep_nested, cache={"k": []})
    with pytest.raises(Untraceable):
        trace([layer], [X])
    assert layer.cache == {"k": []}


def test_tracing_changes_neither_layers_nor_random_state() -> None:
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)]
    state = {k: v.clone() for k, v in nn.Sequential(*layers).state_dict().items()}
    random_state = torch.get_rng_state()
    before = describe(layers)
    trace_joint(layers, X.clone().requires_grad_())
    assert describe(layers) == before
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, value in nn.Sequential(*layers).state_dict().items():
        assert torch.equal(value, state[name])
