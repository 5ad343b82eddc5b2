"""Whole pipelines against the plain micro-batch loop, bit for bit, whatever the timing and whoever calls."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, keyed_rng
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.inside import delay, disturb_no_more
from tests.models import Batch, Model, convolutions, cut, every_model, features, images, mlp
from tests.reference import (
    SEED,
    Result,
    collect,
    gradient_like,
    leaf,
    loop_step,
    pipeline_step,
    plain_loop,
    restored,
    unequal,
)

pytestmark = pytest.mark.usefixtures("one_thread")

# Samples and micro-batches: every power of two, and a last micro-batch that is smaller.
BATCHES = [(8, 1), (8, 2), (8, 4), (8, 8), (7, 4)]


@contextmanager
def delays(*pipes: GPipe, seed: int, longest_us: int = 300) -> Iterator[None]:
    """Plants a random delay before and after every action, so before a slot is given on too."""
    for pipe in pipes:
        delay(pipe, seed, longest_us)
    try:
        yield
    finally:
        for pipe in pipes:
            disturb_no_more(pipe)


def check(make: Model, batch: Batch, num_stages: int, repetitions: int) -> None:
    """Asserts contract 1 for one cut into stages: undisturbed once, then under delays."""
    model = make()
    pipe = GPipe(model, cut(len(model), num_stages))
    for num_samples, pipe.chunks in BATCHES:
        x = batch(num_samples)
        expected = loop_step(model, x, pipe.chunks)
        for pipe.checkpoint in CHECKPOINT_MODES:
            where = f"N={num_samples}, M={pipe.chunks}, {pipe.checkpoint}"
            assert unequal(pipeline_step(pipe, x), expected) == [], where
            for seed in range(repetitions):
                with delays(pipe, seed=seed):
                    assert unequal(pipeline_step(pipe, x), expected) == [], f"{where}, seed {seed}"


@pytest.mark.sampled(10)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@every_model
def test_equals_the_plain_loop(make: Model, batch: Batch, num_stages: int) -> None:
    """Contract 1: output, every gradient and every buffer, for every cut into stages and micro-batches."""
    check(make, batch, num_stages, repetitions=2)


@pytest.mark.soak
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@every_model
def test_equals_the_plain_loop_whatever_the_timing(make: Model, batch: Batch, num_stages: int) -> None:
    check(make, batch, num_stages, repetitions=50)


@every_model
def test_inference_whatever_the_timing(make: Model, batch: Batch) -> None:
    """With more micro-batches than slots."""
    model, x = make().eval(), batch(12)
    pipe = GPipe(model, cut(len(model), 3), chunks=12)
    expected = plain_loop(model, x, 12)
    with torch.no_grad():
        for seed in range(10):
            with delays(pipe, seed=seed):
                assert torch.equal(pipe(x), expected)


Forward = Callable[[Tensor], Tensor]


def two_under_way(model: nn.Module, forward: Forward, inputs: list[Tensor], order: list[int]) -> list[Result]:
    """Forwards of two mini-batches, then their backwards in some order; what each backward left behind."""
    torch.manual_seed(SEED)
    with restored(model):
        leaves = [leaf(x) for x in inputs]
        outputs = [forward(x) for x in leaves]
        return [collect(model, leaves[i], outputs[i]) for i in order]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["first first", "last first"])
@every_model
def test_two_mini_batches_under_way(make: Model, batch: Batch, order: list[int]) -> None:
    """Each with its own key, its own buffers to recompute with, and its own activations."""
    model, inputs = make(), list(batch(14).chunk(2))
    pipe = GPipe(model, cut(len(model), 3), chunks=4)

    def loop(x: Tensor) -> Tensor:
        with keyed_rng(model):
            return torch.cat([model(c) for c in x.chunk(4)])

    expected = two_under_way(model, loop, inputs, order)
    for pipe.checkpoint in CHECKPOINT_MODES:
        for seed in range(3):
            with delays(pipe, seed=seed):
                ours = two_under_way(model, pipe, inputs, order)
            assert [unequal(a, b) for a, b in zip(ours, expected, strict=True)] == [[], []], pipe.checkpoint


def at_once(*calls: Callable[[], None]) -> None:
    """Runs each call in a thread of its own, all from one moment on, and raises what they raise."""
    begin = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> None:
        begin.wait()
        call()

    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(run, calls))


def check_two_pipelines_at_once(repetitions: int) -> None:
    """Asserts that two pipelines, each called by a thread of its own, are right from the first call on."""
    cases = []
    for make, batch, num_stages in ((mlp, features, 2), (convolutions, images, 3)):
        model, x = make(), batch(8)
        pipe = GPipe(model, cut(len(model), num_stages), chunks=4, checkpoint="always")
        cases.append((pipe, x, loop_step(model, x, 4)))

    def train(pipe: GPipe, x: Tensor, expected: Result) -> None:
        for _ in range(repetitions):
            assert unequal(pipeline_step(pipe, x), expected) == []

    with delays(*(pipe for pipe, _, _ in cases), seed=repetitions):
        at_once(*(functools.partial(train, *case) for case in cases))
    # Tracing switches it on for a while, for all threads.
    assert not torch.is_anomaly_enabled()


def test_two_pipelines_at_once() -> None:
    """Both compile, and run, at the same time."""
    for _ in range(3):
        check_two_pipelines_at_once(repetitions=10)


def check_one_pipeline_in_two_threads(make: Model, batch: Batch, repetitions: int) -> None:
    """Asserts that two threads that train one pipeline, each on its own loss, get their own gradients."""
    model, (a, b) = make(), batch(16).chunk(2)
    pipe = GPipe(model, cut(len(model), 3), chunks=4)

    def step(forward: Forward, x: Tensor) -> list[Tensor]:
        x = leaf(x)
        y = forward(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], gradient_like(y))]

    def loop(x: Tensor) -> Tensor:
        return torch.cat([model(c) for c in x.chunk(4)])

    expected = [step(loop, x) for x in (a, b)]

    def train(x: Tensor, expected: list[Tensor]) -> None:
        for _ in range(repetitions):
            assert all(map(torch.equal, step(pipe, x), expected))

    batches = {n: b.clone() for n, b in model.named_buffers() if n.endswith("num_batches_tracked")}
    with delays(pipe, seed=repetitions):
        at_once(lambda: train(a, expected[0]), lambda: train(b, expected[1]))
    after = dict(model.named_buffers())
    assert [int(after[n] - before) for n, before in batches.items()] == [2 * 4 * repetitions] * len(batches)


@pytest.mark.parametrize(("make", "batch"), [(mlp, features), (convolutions, images)])
def test_one_pipeline_in_two_threads(make: Model, batch: Batch) -> None:
    """Mini-batches of one pipeline run in turn, forwards and backwards of both threads in any order."""
    check_one_pipeline_in_two_threads(make, batch, repetitions=30)


@pytest.mark.soak
def test_threads_again_and_again() -> None:
    for _ in range(10):
        check_two_pipelines_at_once(repetitions=100)
        check_one_pipeline_in_two_threads(convolutions, images, repetitions=200)


def test_inference_in_two_threads() -> None:
    torch.manual_seed(0)
    pipe = GPipe(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh()), [2, 2], chunks=4)
    inputs = [torch.randn(64, 64) for _ in range(2)]

    @torch.no_grad()
    def call(x: Tensor, expected: Tensor) -> None:
        for _ in range(300):
            assert torch.equal(pipe(x), expected)

    a, b = [(x, pipe(x).detach()) for x in inputs]
    at_once(lambda: call(*a), lambda: call(*b))
