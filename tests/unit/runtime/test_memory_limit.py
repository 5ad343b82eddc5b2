"""What is saved within a number of bytes: everything if it fits, else less, and an error if nothing fits."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.schedule import Kind
from tests.internals import plan_of

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


def pipeline(**options: object) -> GPipe:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)))
    return GPipe(layers, [4, 4], devices=["cpu"] * 2, chunks=4, **options)  # type: ignore[arg-type]


def needed(pipe: GPipe, x: Tensor = X) -> int:
    """Returns the bytes that a step needs on the CPU, which both stages share."""
    (total,) = pipe.memory(x).totals.values()
    assert total is not None
    return total


def recomputes(pipe: GPipe) -> bool:
    return any(action.kind is Kind.R for stage in plan_of(pipe, X).schedule.stages for action in stage)


def test_less_is_saved_if_it_does_not_and_the_limit_is_kept() -> None:
    most, least = (needed(pipeline(checkpoint=mode)) for mode in ("never", "always"))
    assert least < most
    limit = (least + most) // 2
    pipe = pipeline(memory=limit)
    assert recomputes(pipe)
    assert needed(pipe) <= limit


def test_the_error_says_what_the_balance_that_needs_least_needs() -> None:
    sizes = itertools.pairwise([16, 16, 8, 16, 64, 16, 16])
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(i, o), nn.GELU(), nn.LayerNorm(o)) for i, o in sizes))

    def too_little(memory: int) -> int:
        pipe = GPipe(layers, devices=["cpu"] * 2, chunks=4, memory=memory)
        with pytest.raises(ValueError, match="at least") as caught:
            pipe(torch.randn(32, 16))
        found = re.search(r"at least ([\d,]+) bytes", str(caught.value))
        assert found is not None
        return int(found[1].replace(",", ""))

    least = too_little(1000)
    assert too_little(least - 1) == least
    GPipe(layers, devices=["cpu"] * 2, chunks=4, memory=least)(torch.randn(32, 16))
