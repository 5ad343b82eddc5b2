"""A capture has the calls of a model's forward, and leaves the model as it was."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast.layers.quantized import stand_in
from gpipe_fast.weights.lazy_tensor import as_meta
from tests.quantized import PackedLinear
from tests.unit.from_model.recording import Calls, record_of

X = torch.empty(4, 3)


def targets(flow: Any) -> list[str]:
    found = (type(call.target) if call.is_module else call.target for call in flow.calls)
    return [getattr(each, "__name__", each) for each in found]


def test_blocks_and_modules_around_them_are_single_calls() -> None:
    blocks = [nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(2)]
    norm = nn.LayerNorm(3)

    def forward(x: Tensor) -> Tensor:
        return norm(F.dropout(blocks[1](blocks[0](x) + 1), 0.1))

    flow = record_of(Calls(forward, [*blocks, norm]), X, blocks=blocks)
    assert targets(flow) == ["Sequential", "add", "Sequential", "dropout", "LayerNorm"]
    assert [call.draws for call in flow.calls] == [False, False, False, True, False]
    assert [call.is_module for call in flow.calls] == [True, False, True, False, True]


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
    assert targets(flow) == ["mul", "getitem", "iadd", "setitem", "relu_"]
    assert [bool(call.mutates) for call in flow.calls] == [False, False, True, True, True]


def test_quantized_weights_need_no_data() -> None:
    """As those of stages in other processes, or, on the CPU, those on GPUs."""

    class Checked(PackedLinear):
        def forward(self, x: Tensor) -> Tensor:
            assert self.weight.state.scale.device == x.device
            return super().forward(x)

    block = Checked(3, 3)
    block.weight = stand_in(block.weight, as_meta)
    flow = record_of(Calls(lambda x: block(x) + 1, [block]), X, blocks=[block])
    assert targets(flow) == ["Checked", "add"]
    assert block.weight.is_meta
