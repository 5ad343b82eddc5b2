"""A record is cut after each block; values that later layers read are carried to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast.from_model.cut import Part, cut
from tests.unit.from_model.recording import Calls, record_of

X = torch.empty(4, 3)


def parts_of(function: Callable[..., Any], blocks: Sequence[nn.Module], *more: nn.Module) -> list[Part]:
    flow = record_of(Calls(function, [*blocks, *more]), X, blocks=blocks)
    return cut(flow, blocks, list(flow.result.refs()))


def names(part: Part) -> list[str]:
    return [getattr(call.target, "__name__", type(call.target).__name__) for call in part.calls]


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(3, 3) for _ in range(count)]


def test_functions_stay_before_the_block_that_follows_them() -> None:
    first, second = linears(2)
    parts = parts_of(lambda x: torch.sin(second(torch.tanh(first(torch.exp(x))))), [first, second])
    assert [names(part) for part in parts] == [["exp"], ["Linear"], ["tanh", "Linear"], ["sin"]]
    assert [part.block for part in parts] == [None, first, second, None]


def test_a_value_is_carried_until_its_last_use() -> None:
    blocks = linears(3)

    def forward(x: Tensor) -> Tensor:
        shared, y = x * 2, x
        for index, block in enumerate(blocks):
            y = block(y)
            if index < 2:
                y = y + shared
        return y

    parts = parts_of(forward, blocks)
    assert [len(part.given) for part in parts] == [1, 2, 2, 2, 1]
    # Those that are read longest come first, so that layers with equal code get equal positions.
    assert parts[1].given[0] == parts[2].given[0]
    for before, after in itertools.pairwise(parts):
        assert before.returned == after.given
