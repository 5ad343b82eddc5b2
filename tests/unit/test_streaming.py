"""The order in which a stream begins and finishes calls, with a pipeline that only counts them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from gpipe_fast.streaming import arguments_in, results


class Counted:
    """Stands in for the calls of a pipeline; ``events`` lists what was called."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.in_flight: list[Any] = []

    @property
    def num_in_flight(self) -> int:
        return len(self.in_flight)

    def check_unchanged(self) -> None:
        pass

    def begin(self, batch: Any) -> None:
        self.events.append(f"begin {batch}")
        self.in_flight.append(batch)

    def finish(self) -> Any:
        self.events.append(f"finish {self.in_flight[0]}")
        return self.in_flight.pop(0)

    def close(self) -> None:
        self.events.append("close")


def test_mini_batches_are_read_ahead_up_to_the_depth() -> None:
    stream = Counted()
    assert list(results(stream, range(4), 2, num_stages=1)) == [0, 1, 2, 3]
    assert ", ".join(stream.events) == (
        "begin 0, begin 1, finish 0, begin 2, finish 1, begin 3, finish 2, finish 3, close"
    )


@pytest.mark.parametrize("depth", [1, 2, 3, 7])
def test_none_waits_for_a_result(depth: int) -> None:
    """Three values are each increased four times; at most three mini-batches are in flight."""
    ready, stream = deque([0, 10, 20]), Counted()

    def requests() -> Iterator[Any]:
        for _ in range(12):
            while not ready:
                yield None
            yield ready.popleft()

    found = []
    for value in results(stream, requests(), depth, num_stages=1):
        assert stream.num_in_flight < min(depth, 3)
        found.append(value + 1)
        ready.append(value + 1)
    assert found == [step + start for step in range(1, 5) for start in (0, 10, 20)]


def test_none_with_nothing_in_flight_is_a_mini_batch() -> None:
    stream = Counted()
    assert list(results(stream, [None, 1], 2, num_stages=1)) == [None, 1]


def test_the_default_depth_is_two_per_stage() -> None:
    """Nothing is read before the first result is asked for."""
    for num_stages in (1, 3):
        stream = Counted()
        generator = results(stream, range(100), None, num_stages)
        assert stream.events == []
        assert next(generator) == 0
        assert stream.events == [*(f"begin {batch}" for batch in range(2 * num_stages)), "finish 0"]


def test_mini_batches_are_arguments_of_calls() -> None:
    assert arguments_in((1, 2)) == ((1, 2), {})
    assert arguments_in({"x": 1}) == ((), {"x": 1})
    assert arguments_in([1, 2]) == (([1, 2],), {})
