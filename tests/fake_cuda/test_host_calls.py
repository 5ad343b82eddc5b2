"""Calls of the CUDA runtime that a mini-batch makes besides its work, on the fake runtime."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fake_cuda import host_call_cases as cases


@pytest.mark.parametrize(
    "case", [cases.a_mini_batch_creates_no_events, cases.a_mini_batch_keeps_the_errors_of_earlier_calls]
)
def test_the_end_of_a_mini_batch_asks_no_device(
    case: Callable[[], None], run: Callable[..., list[str]]
) -> None:
    assert run("host_call_cases.py", case.__name__) == [case.__name__]
