"""Inputs of a call: unsupported ones are refused, and keyword arguments reach the first layer."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
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
