"""Calls from several threads do not interfere, at any timing (contract 1)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from gpipe_fast import GPipe
from tests.internals import inject_delays, remove_faults
from tests.models import Batch, Model, convolutions, features, images, mlp, uneven_balance
from tests.reference import (
    Result,
    gradient_like,
    leaf,
    loop_step,
    pipeline_step,
    unequal,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@contextmanager
def random_delays(*pipes: GPipe, seed: int, max_delay_us: int = 300) -> Iterator[None]:
    """Injects a random delay before and after every action, and so before a slot is released."""
    for pipe in pipes:
        inject_delays(pipe, seed, max_delay_us)
    try:
        yield
    finally:
        for pipe in pipes:
            remove_faults(pipe)


Forward = Callable[[Tensor], Tensor]


def run_concurrently(*calls: Callable[[], None]) -> None:
    """Runs each call in its own thread, all started together, and raises their exceptions."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> None:
        start.wait()
        call()

    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(run, calls))


def check_two_pipelines_at_once(repetitions: int) -> None:
    """Asserts that two pipelines, each called from its own thread, are correct from the first call on."""
    cases = []
    for make, batch, num_stages in ((mlp, features, 2), (convolutions, images, 3)):
        model, x = make(), batch(8)
        pipe = GPipe(model, uneven_balance(len(model), num_stages), chunks=4, checkpoint="always")
        cases.append((pipe, x, loop_step(model, x, 4)))

    def train_repeatedly(pipe: GPipe, x: Tensor, expected: Result) -> None:
        for _ in range(repetitions):
            assert unequal(pipeline_step(pipe, x), expected) == []

    with random_delays(*(pipe for pipe, _, _ in cases), seed=repetitions):
        run_concurrently(*(functools.partial(train_repeatedly, *case) for case in cases))
    # Tracing temporarily enables anomaly mode, which is process-wide.
    assert not torch.is_anomaly_enabled()


def test_two_pipelines_in_two_threads_equal_the_plain_loop() -> None:
    """Both pipelines compile and run concurrently."""
    check_two_pipelines_at_once(repetitions=10)


def check_one_pipeline_in_two_threads(make: Model, batch: Batch, repetitions: int) -> None:
    """Asserts that two threads that train one pipeline each get the gradients of their own loss."""
    model, (a, b) = make(), batch(16).chunk(2)
    pipe = GPipe(model, uneven_balance(len(model), 3), chunks=4)

    def step(forward: Forward, x: Tensor) -> list[Tensor]:
        x = leaf(x)
        y = forward(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], gradient_like(y))]

    def loop(x: Tensor) -> Tensor:
        return torch.cat([model(c) for c in x.chunk(4)])

    expected = [step(loop, x) for x in (a, b)]

    def train_repeatedly(x: Tensor, expected: list[Tensor]) -> None:
        for _ in range(repetitions):
            assert all(map(torch.equal, step(pipe, x), expected))

    counts_before = {n: b.clone() for n, b in model.named_buffers() if n.endswith("num_batches_tracked")}
    with random_delays(pipe, seed=repetitions):
        run_concurrently(lambda: train_repeatedly(a, expected[0]), lambda: train_repeatedly(b, expected[1]))
    after = dict(model.named_buffers())
    assert [int(after[n] - before) for n, before in counts_before.items()] == [2 * 4 * repetitions] * len(
        counts_before
    )


@pytest.mark.parametrize(("make", "batch"), [(mlp, features), (convolutions, images)])
def test_one_pipeline_trained_from_two_threads_equals_the_plain_loop(make: Model, batch: Batch) -> None:
    """A pipeline runs one forward or backward at a time; those of two threads interleave in any order."""
    check_one_pipeline_in_two_threads(make, batch, repetitions=10)


@pytest.mark.soak
def test_concurrent_training_repeated_many_times() -> None:
    for _ in range(10):
        check_two_pipelines_at_once(repetitions=100)
        check_one_pipeline_in_two_threads(convolutions, images, repetitions=200)
