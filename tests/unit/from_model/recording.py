"""Records of small functions and models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast.from_model.blocks import opened_for
from gpipe_fast.from_model.capture import Given, Modules, capture_call
from gpipe_fast.from_model.dataflow import Dataflow


class Calls(nn.Module):
    """A model whose forward is a function, and that has these modules."""

    def __init__(self, function: Callable[..., Any], modules: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(modules)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def no_decision(*args: Any) -> Any:
    raise AssertionError("forward reads a number from a tensor")


def record_of(
    function: Any, *inputs: Tensor, blocks: Sequence[nn.Module] = (), split: Sequence[int] = ()
) -> Dataflow:
    """Returns the capture of a function, or of a model with these blocks, without unused calls.

    Args:
        function: the function or the model.
        inputs: its inputs.
        blocks: the blocks.
        split: the inputs whose first dimension is the batch.
    """
    model = function if isinstance(function, nn.Module) else Calls(function, _modules_in(function))
    modules = Modules(opened_for(model, blocks), set(blocks))
    sizes = [inputs[split[0]].shape[0]] if split else []
    given = Given(inputs, {(i, 0): 0 for i in split}, sizes, (), lambda tensors: (tuple(tensors), {}))
    return capture_call(model, given, modules, torch.device("cpu"), no_decision).flow.pruned()


def _modules_in(function: Callable[..., Any]) -> list[nn.Module]:
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, nn.Module)]
