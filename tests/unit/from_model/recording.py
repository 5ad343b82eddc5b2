"""Records of small functions and models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast.from_model.blocks import opened_for
from gpipe_fast.from_model.dataflow import Dataflow
from gpipe_fast.from_model.record import record_call


class Calls(nn.Module):
    """A model whose forward is a function, and that has these modules."""

    def __init__(self, function: Callable[..., Any], modules: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(modules)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def no_decision(*args: Any) -> Any:
    raise AssertionError("forward reads a number from a tensor")


def record_of(function: Any, *inputs: Tensor, blocks: Sequence[nn.Module] = ()) -> Dataflow:
    """Returns the record of a function, or of a model with these blocks, without unused calls."""
    model = function if isinstance(function, nn.Module) else Calls(function, _modules_in(function))
    opened = opened_for(model, blocks)
    call = model, model.forward, lambda given: (tuple(given), {}), inputs
    flow, _ = record_call(*call, opened, set(blocks), torch.device("cpu"), no_decision)
    return flow.pruned()


def _modules_in(function: Callable[..., Any]) -> list[nn.Module]:
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, nn.Module)]
