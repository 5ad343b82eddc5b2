"""Whether a product may add in place: the answer holds for numbers it was not tried on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpipe_fast.lower import exactness
from gpipe_fast.lower.exactness import accumulates_exactly

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [
    (1, 1, 1),
    (1, 2, 1),
    (1, 4, 1),
    (1, 3, 2),
    (2, 4, 1),
    (8, 4, 8),
    (16, 1, 16),
    (64, 8, 64),
    (1, 64, 64),
    (64, 512, 64),
]


def operands(m: int, k: int, n: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """As for the gradient of a weight: the left operand is a transposed view."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return random(k, m).t(), random(k, n), random(m, n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_yes_means_equal_bits_for_other_numbers(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    a, b, _ = operands(*shape, dtype, 0)
    if not accumulates_exactly(a, b):
        return
    for seed in range(1, 60):
        a, b, c = operands(*shape, dtype, seed)
        assert torch.equal(torch.addmm(c, a, b), c + a @ b)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_means_that_some_numbers_differ(shape: tuple[int, int, int]) -> None:
    a, b, _ = operands(*shape, torch.float32, 0)
    if accumulates_exactly(a, b):
        return
    trials = (operands(*shape, torch.float32, seed) for seed in range(1, 200))
    assert any(not torch.equal(torch.addmm(c, a, b), c + a @ b) for a, b, c in trials)


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        (torch.empty(0, 4), torch.empty(4, 2), "empty"),
        (torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64), "integers"),
        (torch.ones(2, 2, device="meta"), torch.ones(2, 2, device="meta"), "no CPU tensors"),
    ],
)
def test_what_cannot_be_tried_is_not_promised(a: Tensor, b: Tensor, why: str) -> None:
    assert not accumulates_exactly(a, b), why


def test_is_tried_once_per_layout_and_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    exactness._tried.cache_clear()
    a, b = torch.ones(7, 5), torch.ones(5, 3)
    for _ in range(3):
        accumulates_exactly(a, b)
    assert exactness._tried.cache_info().misses == 1
    accumulates_exactly(torch.ones(5, 7).t(), b)  # other strides may take another kernel
    assert exactness._tried.cache_info().misses == 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    accumulates_exactly(a, b)
    assert exactness._tried.cache_info().misses == 3
