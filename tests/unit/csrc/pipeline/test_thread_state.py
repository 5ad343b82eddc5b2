"""Thread state: what workers inherit from the calling thread, and what they do not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from gpipe_fast import GPipe
from gpipe_fast.lower import bitwise_addmm
from gpipe_fast.schedule import fill_drain
from tests.internals import inject_failure, remove_faults
from tests.models import convolutions, features, images, mlp
from tests.reference import (
    Result,
    collect,
    leaf,
    loop_step,
    pipeline,
    pipeline_step,
    plain_loop,
    restored,
    unequal,
)


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Sets the number of intra-op threads of the calling thread for the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Energy(nn.Module):
    """Scales its input by the input's mean square, which MKL sums."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten()
        return x * (flat.dot(flat) / flat.numel())


def thread_sensitive() -> nn.Sequential:
    """Returns layers whose bits depend on MKL's threads in the forward and on OpenMP's in the backward."""
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(64), Energy(), nn.LayerNorm(64))


def vectors() -> Tensor:
    return torch.randn(2000, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def by_threads() -> dict[int, Result]:
    """Returns the plain loop's step on two micro-batches by thread count. All must differ."""
    found = {}
    for number in (1, 2, 3, 4):
        with intra_op_threads(number):
            found[number] = loop_step(thread_sensitive(), vectors(), 2)
    assert "output" in unequal(found[1], found[2])
    for number, result in found.items():
        for other in set(found) - {number}:
            assert {"gradient of 0.weight", "gradient of 2.weight"} <= set(unequal(result, found[other]))
    return found


def threads_of(result: Result, by_threads: dict[int, Result]) -> list[int]:
    """Returns the thread counts with which the plain loop has the same bits."""
    return [number for number, expected in by_threads.items() if unequal(result, expected) == []]


def thread_counts() -> dict[str, int]:
    """Returns the calling thread's thread counts of ATen, OpenMP and MKL."""
    found = re.findall(r"(\w+)\(\) : ([0-9]+)", torch.__config__.parallel_info())
    return {name: int(number) for name, number in found if "hardware" not in name}


@pytest.mark.parametrize(
    ("num_stages", "callers", "threads"),
    [(1, 3, 3), (2, 4, 2), (2, 3, 1), (2, 1, 1), (3, 4, 1)],
)
def test_stages_share_the_callers_threads(
    by_threads: dict[int, Result], num_stages: int, callers: int, threads: int
) -> None:
    pipe = GPipe(thread_sensitive(), [1] * (num_stages - 1) + [4 - num_stages], chunks=2)
    with intra_op_threads(callers):
        assert threads_of(pipeline_step(pipe, vectors()), by_threads) == [threads]


def test_threads_per_stage_overrides_the_callers_threads(by_threads: dict[int, Result]) -> None:
    """The setting overrides the caller's thread count, which may change, and does not change it."""
    pipe = GPipe(thread_sensitive(), [1, 2], chunks=2)
    for threads in (0, -1):
        message = f"^threads_per_stage must be a positive integer or None, got {threads}$"
        with pytest.raises(ValueError, match=message):
            pipe.threads_per_stage = threads
    assert pipe.threads_per_stage is None
    for callers in (1, 4):
        with intra_op_threads(callers):
            before = thread_counts()
            for pipe.threads_per_stage in (2, 3, None):
                expected = pipe.threads_per_stage or max(1, callers // 2)
                assert threads_of(pipeline_step(pipe, vectors()), by_threads) == [expected]
                assert thread_counts() == before


def test_a_thread_count_set_after_the_forward_does_not_affect_its_backward(
    by_threads: dict[int, Result],
) -> None:
    """The backward's programs were lowered for the forward's thread count."""
    pipe = GPipe(thread_sensitive(), [1, 2], chunks=2)
    with restored(pipe), intra_op_threads(4):
        x = leaf(vectors())
        y = pipeline(pipe, x)
        with intra_op_threads(1):
            result = collect(pipe, x, y)
    assert threads_of(result, by_threads) == [2]


@pytest.mark.parametrize("first", ["call", "memory", "inference"])
def test_decisions_of_lowering_are_made_with_the_threads_of_stages(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = list[int]()

    def are_equal(*operands: object) -> bool:
        used.append(torch.get_num_threads())
        return True

    monkeypatch.setattr(bitwise_addmm, "_are_equal", are_equal)
    pipe = GPipe(nn.Sequential(nn.Linear(17, 33), nn.Tanh(), nn.Linear(33, 17)), [1, 2], chunks=4)
    pipe.threads_per_stage, x = 3, torch.randn(64, 17)
    with intra_op_threads(1):
        if first == "memory":
            assert pipe.memory(x)
        elif first == "inference":
            with torch.no_grad():
                pipe(x)
        pipe(x).sum().backward()
    assert set(used) == {3}


def test_steps_and_failures_do_not_change_thread_counts_of_callers_and_new_threads() -> None:
    def counts() -> list[dict[str, int]]:
        with ThreadPoolExecutor(1) as other:
            return [thread_counts(), other.submit(thread_counts).result()]

    pipe = GPipe(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), [1, 1], chunks=2)
    pipe.threads_per_stage = 1
    with intra_op_threads(3):
        before = counts()
        output = pipe(features())
        assert counts() == before
        for action, run in (("1F1", lambda: pipe(features())), ("0B0", output.sum().backward)):
            inject_failure(pipe, action)
            with pytest.raises(ValueError, match="injected"):
                run()
            assert counts() == before
        remove_faults(pipe)
        pipe(features()).sum().backward()
        assert counts() == before


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def layers_with_denormals() -> nn.Sequential:
    """Has denormals after layer 2 of the forward, and after layers 1 and 0 of a backward from 1e-20."""
    torch.manual_seed(0)
    return nn.Sequential(Scale(1e-20), nn.Linear(6, 6, bias=False), Scale(1e-20), Scale(1e20))


@contextmanager
def flush_denormals(on: bool) -> Iterator[None]:
    """Sets whether the calling thread flushes denormals to zero in the block."""
    if not torch.set_flush_denormal(on):
        pytest.skip("this processor cannot flush denormal numbers")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def test_denormals_are_flushed_as_in_the_calling_thread(one_thread: None) -> None:
    """The forward and the backward each use the setting of the thread that calls them."""
    model, x = layers_with_denormals(), features()
    pipe = GPipe(model, [1, 2, 1], chunks=4)

    def step(forward: Any, flush: tuple[bool, bool]) -> Result:
        with restored(model):
            inputs = leaf(x)
            with flush_denormals(flush[0]):
                output = forward(inputs)
            with flush_denormals(flush[1]):
                return collect(model, inputs, output, torch.full_like(output, 1e-20))

    settings = [(False, False), (True, False), (False, True), (False, False)]
    expected = {flush: step(lambda x: plain_loop(model, x, 4), flush) for flush in settings}
    for flush, result in expected.items():
        for other in set(expected) - {flush}:
            assert unequal(result, expected[other]) != [], "the test does not depend on denormal numbers"
    for flush in settings:
        assert unequal(step(pipe, flush), expected[flush]) == [], flush


def test_workers_inherit_inference_mode(one_thread: None) -> None:
    """Covers a model made and run in inference mode, and one that is run in it and trained outside."""
    with torch.inference_mode():
        model, x = convolutions(), images()
        with restored(model):
            y = plain_loop(model, x, 4)
            expected = {"output": y, **{n: b.clone() for n, b in model.named_buffers()}}
        with restored(model):
            y = pipeline(GPipe(model, [2, 2, 2], chunks=4), x)
            assert unequal({"output": y, **dict(model.named_buffers())}, expected) == []
            assert y.is_inference()
    model, x = convolutions(), images()
    pipe = GPipe(model, [2, 2, 2], chunks=4)
    with restored(model), torch.inference_mode():
        assert pipe(x).is_inference()
        assert not any(b.is_inference() for b in model.buffers())
    assert unequal(pipeline_step(pipe, x), loop_step(model, x, 4)) == []


def test_the_profiler_sees_every_action_once() -> None:
    """A range has the action's name, runs in the stage's thread, and contains its operators."""
    pipe, x = GPipe(mlp(), [1, 1, 3], chunks=4, checkpoint="never"), features()
    pipe(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        pipe(x).sum().backward()
    schedule = fill_drain(3, 4, recomputed=())
    events = profiler.events() or []
    ranges = [(e.name, e.thread) for e in events if e.name.startswith("PP:")]
    assert sorted(name for name, _ in ranges) == sorted(f"PP:{a}" for a in schedule.order())
    threads = {(int(name[3]), thread) for name, thread in ranges}
    assert len(threads) == len({thread for _, thread in threads}) == 3
    assert not {e.thread for e in events if e.name == "GPipeBackward"} & {thread for _, thread in threads}
    outer = [e.cpu_parent.name for e in events if e.name == "aten::tanh"]
    assert sorted(outer) == [f"PP:2F{m}" for m in range(4)]
