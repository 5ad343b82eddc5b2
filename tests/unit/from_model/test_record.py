"""A record has the calls of a model's forward, and leaves the model as it was."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast.from_model.dataflow import Owned, Ref
from tests.unit.from_model.recording import Calls, record_of

X = torch.empty(4, 3)


def targets(flow: Any) -> list[str]:
    return [getattr(call.target, "__name__", type(call.target).__name__) for call in flow.calls]


def test_blocks_and_modules_around_them_are_single_calls() -> None:
    blocks = [nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(2)]
    norm = nn.LayerNorm(3)

    def forward(x: Tensor) -> Tensor:
        return norm(F.dropout(blocks[1](blocks[0](x) + 1), 0.1))

    flow = record_of(Calls(forward, [*blocks, norm]), X, blocks=blocks)
    assert targets(flow) == ["Sequential", "add", "Sequential", "dropout", "LayerNorm"]
    assert [call.draws for call in flow.calls] == [False, False, False, True, False]
    assert [call.is_module for call in flow.calls] == [True, False, True, False, True]


def test_parameters_between_blocks_are_named_by_their_module() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    model = Scales()
    (call,) = record_of(model, X).calls
    assert call.arguments.leaves == (Ref(0), Owned(model, "scale"))
    assert type(model.scale) is nn.Parameter


def test_the_model_is_left_as_it_was() -> None:
    norm = nn.BatchNorm1d(3)
    called: list[Any] = []
    norm.register_forward_hook(lambda *args: called.append(args))
    before = norm.running_mean.clone()
    state = torch.get_rng_state()
    record_of(Calls(lambda x: F.dropout(norm(x)), [norm]), X)
    assert called == []
    assert torch.equal(norm.running_mean, before)
    assert int(norm.num_batches_tracked) == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert type(norm.running_mean) is Tensor


def test_changes_in_place_are_found_by_what_changes() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        y[:, 1:] += 1
        y.relu_()
        return y

    flow = record_of(forward, X)
    assert targets(flow) == ["mul", "__getitem__", "add_", "__setitem__", "relu_"]
    assert [bool(call.mutates) for call in flow.calls] == [False, False, True, True, True]


def test_modes_around_calls() -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x + 1
        with torch.autocast("cpu", torch.bfloat16):
            return y * x

    first, second = record_of(forward, X).calls
    assert (first.surroundings.grad, first.surroundings.autocast) == (False, None)
    assert (second.surroundings.grad, second.surroundings.autocast) == (True, torch.bfloat16)


def test_a_custom_function_is_a_single_call() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x + x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 3

    assert targets(record_of(lambda x: Double.apply(x), X)) == ["apply"]


def test_a_module_whose_shapes_need_elements_runs_on_zeros() -> None:
    class Routes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.zeros_like(x)
            rows = (x.sum(1) > 0).nonzero().flatten()
            return y.index_add(0, rows, x[rows])

    routes = Routes()
    flow = record_of(Calls(routes, [routes]), X.clone().requires_grad_(), blocks=[routes])
    assert targets(flow) == ["Routes"]
    assert flow.values[-1].shape == (4, 3)
    assert flow.values[-1].requires_grad


def test_unpacking_a_tensor_is_a_call() -> None:
    def forward(x: Tensor) -> Tensor:
        a, b, c = x.T
        return a + b + c

    assert targets(record_of(forward, X)) == ["__get__", "unbind", "add", "add"]
