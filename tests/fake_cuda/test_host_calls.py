"""Calls of the CUDA runtime that a mini-batch makes besides its work, on the fake runtime."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fake_cuda import host_call_cases as cases
from tests.fake_cuda.race_detector import Line


@pytest.mark.parametrize(
    "case", [cases.a_mini_batch_creates_no_events, cases.a_mini_batch_keeps_the_errors_of_earlier_calls]
)
def test_the_end_of_a_mini_batch_asks_no_device(
    case: Callable[[], None], run: Callable[..., list[str]]
) -> None:
    assert run("host_call_cases.py", case.__name__) == [case.__name__]


def test_a_large_tensor_crosses_pinned_memory_in_few_calls(logged: Callable[..., list[Line]]) -> None:
    """A piece takes six calls: two copies, and for each stream an event and a wait."""
    name = cases.a_large_tensor_crosses_pinned_memory.__name__
    lines = logged("host_call_cases.py", name, expected=[name])
    lines = lines[
        max(i for i, line in enumerate(lines) if line.kind == "mark" and line.words[0] == "begin") :
    ]
    to_host = [line for line in lines if line.kind == "copy" and line.words[1] == "d2p"]
    streams = {line.words[0] for line in lines if line.kind == "copy" and line.words[1] in ("d2p", "p2d")} - {
        line.words[0] for line in lines if line.kind in ("read", "write")
    }
    calls = sum(line.kind in ("copy", "record", "wait") and line.words[0] in streams for line in lines)
    copied = sum(int(line.words[-1]) for line in to_host) / cases.MIB
    assert copied > 36
    assert calls / copied < 2.5
