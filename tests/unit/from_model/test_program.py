"""What a model returns is put together from what its micro-batches return."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gpipe_fast import GPipe
from gpipe_fast.from_model.program import leaf_names

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*stages idle")]
X = torch.randn(6, 4)


class Net(nn.Module):
    """Two blocks, and a function of the input and their output."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, torch.tanh(self.blocks[1](self.blocks[0](x))))


def test_tensors_are_concatenated_along_the_batch_wherever_it_is() -> None:
    model = Net(lambda x, y: {"y": y, "t": y.T, "more": [x * 2, (None, 3)]})
    pipe = GPipe.from_model(model, (X,), devices=["cpu"] * 2, balance=[1, 1], chunks=2)
    found, expected = pipe(X), model(X)
    assert found.keys() == expected.keys()
    for key in ("y", "t"):
        torch.testing.assert_close(found[key], expected[key])
    assert torch.equal(found["more"][0], X * 2)
    assert found["more"][1] == (None, 3)


def test_names_of_outputs_are_paths() -> None:
    value = {"loss": 1.0, "past": ([2.0, 3.0], {"x": 4.0}), "none": None}
    assert leaf_names(value) == ["loss", "past[0][0]", "past[0][1]", "past[1]x", "none"]
    assert leaf_names(5.0) == ["tensor"]
    assert leaf_names([]) == []


@dataclass
class Sampled(OrderedDict[str, Tensor]):
    """An output as diffusers has it, which PyTorch flattens without names."""

    sample: Tensor

    def __post_init__(self) -> None:
        self["sample"] = self.sample


pytree.register_pytree_node(
    Sampled, lambda x: (list(x.values()), list(x)), lambda values, _: Sampled(*values)
)


def test_outputs_that_pytorch_flattens_without_names() -> None:
    model = GPipe.from_model(Net(lambda x, y: Sampled(y * 2)), (X,), devices=["cpu"] * 2, chunks=3)
    output = model(X)
    assert type(output) is Sampled
    assert torch.equal(output.sample, model.plain()(X).sample)
