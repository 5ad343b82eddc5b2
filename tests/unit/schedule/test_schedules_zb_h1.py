"""ZB-H1: the bubble of the paper, as many micro-batches as 1F1B, and its drawing."""

from __future__ import annotations

import itertools
import re

import pytest

from gpipe_fast.schedule import Kind, one_f_one_b, zb_h1

NUMBERS = [(k, m) for k in (1, 2, 3, 4, 6) for m in (1, 2, 4, 7, 8, 16)]


@pytest.mark.parametrize(("num_stages", "num_microbatches"), NUMBERS)
def test_the_bubble_is_that_of_the_paper(num_stages: int, num_microbatches: int) -> None:
    """F, I and W take a tick each: the bubble is K - 1 ticks, and 3 (K - 1) for 1F1B."""
    ticks = zb_h1(num_stages, num_microbatches).critical_path()
    assert ticks >= 3 * num_microbatches + num_stages - 1
    if num_microbatches >= num_stages:
        assert ticks == 3 * num_microbatches + num_stages - 1


@pytest.mark.parametrize(("num_stages", "num_microbatches"), NUMBERS)
def test_no_stage_holds_more_than_the_first_one_of_1f1b(num_stages: int, num_microbatches: int) -> None:
    for actions in zb_h1(num_stages, num_microbatches, recomputed=range(num_microbatches)).stages:
        held = itertools.accumulate((a.kind is Kind.F) - (a.kind is Kind.W) for a in actions)
        assert max(held) <= min(num_stages, num_microbatches)
        for kind in (Kind.F, Kind.I, Kind.W):
            assert [a.microbatch for a in actions if a.kind is kind] == list(range(num_microbatches))


def test_weight_gradients_are_deferred() -> None:
    assert zb_h1(3, 4).defers_weights
    assert not one_f_one_b(3, 4, recomputed=(0,)).defers_weights


def test_the_drawing_in_the_docstring() -> None:
    text = str(zb_h1.__doc__)
    drawing = "\n".join(re.findall(r"^        (stage .*)$", text, re.MULTILINE))
    assert str(zb_h1(3, 4)) == drawing
