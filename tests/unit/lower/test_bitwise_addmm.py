"""Whether a product may accumulate in place: the answer of one trial holds for other numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpipe_fast.lower.bitwise_addmm import addmm_is_bitwise_equal

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [(1, 1, 1), (1, 4, 1), (1, 3, 2), (2, 4, 1), (8, 4, 8), (16, 1, 16), (1, 64, 64), (64, 512, 64)]


def operands(m: int, k: int, n: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the operands of a weight gradient, the left one a transposed view, and an accumulator."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return random(k, m).t(), random(k, n), random(m, n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_answer_of_one_trial_holds_for_other_numbers(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """True means that no product of these shapes changes a bit; False, that some product does."""
    a, b, _ = operands(*shape, dtype, 0)
    others = (operands(*shape, dtype, seed) for seed in range(1, 100))
    equal = all(torch.equal(torch.addmm(c, a, b), c + a @ b) for a, b, c in others)
    assert addmm_is_bitwise_equal(a, b) == equal


@pytest.mark.parametrize("in_blocks", [False, True])
def test_a_product_that_sums_in_blocks_is_detected(in_blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces ``addmm``, so that both answers are tested on every machine."""

    def addmm(c: Tensor, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        if in_blocks:
            return torch.add(c + a[:, :2] @ b[:2], a[:, 2:] @ b[2:], out=out)
        return torch.add(c, a @ b, out=out)

    monkeypatch.setattr(torch, "addmm", addmm)
    # Answers are cached: no other test has these shapes.
    assert addmm_is_bitwise_equal(torch.ones(13 + in_blocks, 5), torch.ones(5, 11)) != in_blocks


def test_operands_that_cannot_be_tried_are_not_exact() -> None:
    integers, elsewhere = torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2, device="meta")
    for a, b in ((torch.empty(0, 4), torch.empty(4, 2)), (integers, integers), (elsewhere, elsewhere)):
        assert not addmm_is_bitwise_equal(a, b)


def test_exactness_is_tried_once_per_layout_and_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[int] = []
    addmm = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *args, **kwargs: trials.append(1) or addmm(*args, **kwargs))

    def was_tried(a: Tensor) -> bool:
        trials.clear()
        addmm_is_bitwise_equal(a, b)
        return bool(trials)

    a, b = torch.ones(7, 5), torch.ones(5, 3)  # no other test has these shapes
    assert [was_tried(a) for _ in range(3)] == [True, False, False]
    a_transposed = torch.ones(5, 7).t()
    # Other strides may take another kernel.
    assert [was_tried(a_transposed) for _ in range(2)] == [True, False]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert [was_tried(a) for _ in range(2)] == [True, False]
