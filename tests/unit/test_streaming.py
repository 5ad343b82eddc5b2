"""The order in which a stream begins and finishes calls, with a pipeline that only counts them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpipe_fast.streaming import arguments_in, check_depth, results


class Counted:
    """Stands in for the calls of a pipeline; ``events`` lists what was called."""

    def __init__(self, fails_at: Any = None) -> None:
        self.events: list[Any] = []
        self.in_flight: list[Any] = []
        self.fails_at = fails_at

    @property
    def num_in_flight(self) -> int:
        return len(self.in_flight)

    def check_unchanged(self) -> None:
        pass

    def begin(self, batch: Any) -> None:
        if batch == self.fails_at:
            raise ValueError(f"batch {batch}")
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
    assert stream.events == [
        "begin 0", "begin 1", "finish 0", "begin 2", "finish 1", "begin 3", "finish 2", "finish 3", "close",
    ]  # fmt: skip


@pytest.mark.parametrize(("num_stages", "depth"), [(1, 2), (2, 4), (3, 6)])
def test_the_default_depth_is_two_per_stage(num_stages: int, depth: int) -> None:
    stream = Counted()
    generator = results(stream, range(100), None, num_stages)
    assert next(generator) == 0
    assert stream.events == [*(f"begin {batch}" for batch in range(depth)), "finish 0"]


def test_nothing_is_read_before_the_first_result_is_asked_for() -> None:
    stream = Counted()
    results(stream, range(4), None, 1)
    assert stream.events == []


def test_results_before_a_failed_mini_batch_come_first() -> None:
    stream = Counted(fails_at=2)
    generator = results(stream, range(4), 3, 1)
    assert [next(generator), next(generator)] == [0, 1]
    with pytest.raises(ValueError, match="batch 2"):
        next(generator)
    assert stream.events[-1] == "close"


def test_results_before_a_failed_iterable_come_first() -> None:
    def batches() -> Iterator[int]:
        yield 0
        raise KeyError("read")

    generator = results(Counted(), batches(), 3, 1)
    assert next(generator) == 0
    with pytest.raises(KeyError, match="read"):
        next(generator)


def test_a_closed_generator_cancels_what_is_in_flight() -> None:
    stream = Counted()
    generator = results(stream, range(9), 3, 1)
    next(generator)
    generator.close()  # type: ignore[attr-defined]
    assert stream.events[-1] == "close"
    assert stream.num_in_flight == 2


@pytest.mark.parametrize("depth", [0, -1, 1.0, True, "2"])
def test_depths_that_are_no_positive_integers_are_refused(depth: object) -> None:
    with pytest.raises(ValueError, match="depth must be a positive integer or None, got"):
        check_depth([], depth)


def test_a_tensor_is_no_iterable_of_mini_batches() -> None:
    with pytest.raises(TypeError, match=r"got a tensor of shape \[2, 3\]; pass \[x\]"):
        check_depth(torch.zeros(2, 3), None)


def test_mini_batches_are_arguments_of_calls() -> None:
    assert arguments_in((1, 2)) == ((1, 2), {})
    assert arguments_in({"x": 1}) == ((), {"x": 1})
    assert arguments_in([1, 2]) == (([1, 2],), {})
