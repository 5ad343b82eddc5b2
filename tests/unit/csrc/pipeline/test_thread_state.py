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
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_fast import GPipe
from gpipe_fast.lower.bitwise_addmm import addmm_is_bitwise_equal
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


def test_thread_counts_include_those_of_openmp_and_mkl() -> None:
    with intra_op_threads(3):
        three = thread_counts()
    names = {name for name, number in three.items() if number == 3}
    assert names >= {"get_num_threads", "omp_get_max_threads"}
    assert ("mkl_get_max_threads" in three) == torch.backends.mkl.is_available()


@pytest.mark.parametrize(
    ("num_stages", "callers", "threads"),
    [(1, 1, 1), (1, 3, 3), (2, 4, 2), (2, 3, 1), (2, 1, 1), (3, 4, 1), (3, 2, 1)],
)
def test_stages_share_the_callers_threads(
    by_threads: dict[int, Result], num_stages: int, callers: int, threads: int
) -> None:
    pipe = GPipe(thread_sensitive(), [1] * (num_stages - 1) + [4 - num_stages], chunks=2)
    with intra_op_threads(callers):
        assert threads_of(pipeline_step(pipe, vectors()), by_threads) == [threads]


@pytest.mark.parametrize("callers", [1, 2, 4])
def test_threads_per_stage_overrides_the_callers_threads(by_threads: dict[int, Result], callers: int) -> None:
    """The setting overrides the caller's thread count and does not change it."""
    pipe = GPipe(thread_sensitive(), [1, 2], chunks=2)
    assert pipe.threads_per_stage is None
    with intra_op_threads(callers):
        before = thread_counts()
        for pipe.threads_per_stage in (2, 1, 3, 2):
            assert threads_of(pipeline_step(pipe, vectors()), by_threads) == [pipe.threads_per_stage]
            assert thread_counts() == before
        pipe.threads_per_stage = None
        assert threads_of(pipeline_step(pipe, vectors()), by_threads) == [max(1, callers // 2)]


@pytest.mark.parametrize("threads", [0, -1])
def test_threads_per_stage_below_one_is_refused(threads: int) -> None:
    pipe = GPipe(mlp(), [2, 3])
    with pytest.raises(
        ValueError, match=f"^threads_per_stage must be a positive integer or None, got {threads}$"
    ):
        pipe.threads_per_stage = threads
    assert pipe.threads_per_stage is None


def test_a_new_thread_count_of_the_caller_changes_the_default_threads_per_stage(
    by_threads: dict[int, Result],
) -> None:
    by_rule, fixed = GPipe(thread_sensitive(), [1, 2], chunks=2), GPipe(thread_sensitive(), [1, 2], chunks=2)
    fixed.threads_per_stage = 2
    for callers in (4, 2, 4):
        with intra_op_threads(callers):
            assert threads_of(pipeline_step(by_rule, vectors()), by_threads) == [callers // 2]
            assert threads_of(pipeline_step(fixed, vectors()), by_threads) == [2]


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


def test_stages_are_lowered_for_the_threads_they_run_with() -> None:
    """On some machines, a product may accumulate in place with 1 thread but not with 3."""
    operands = torch.randn(16, 33).t(), torch.randn(16, 17)
    exact = {}
    for number in (1, 3):
        with intra_op_threads(number):
            exact[number] = addmm_is_bitwise_equal(*operands)
    if exact[1] == exact[3]:
        pytest.skip("products of this shape do not depend on the threads here")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(17, 33), nn.Tanh(), nn.Linear(33, 17)), torch.randn(64, 17)
    for callers, threads in ((1, 3), (3, 1)):
        with intra_op_threads(threads):
            expected = loop_step(model, x, 4)
        pipe = GPipe(model, [1, 2], chunks=4)
        pipe.threads_per_stage = threads
        with intra_op_threads(callers):
            assert unequal(pipeline_step(pipe, x), expected) == [], f"{threads} threads"


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def thread_counts_of_a_new_thread() -> dict[str, int]:
    with ThreadPoolExecutor(1) as other:
        return other.submit(thread_counts).result()


def test_steps_and_failures_do_not_change_the_callers_thread_counts() -> None:
    """The thread counts of new threads do not change, either."""
    pipe = GPipe(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), [1, 1], chunks=2)
    untraceable = GPipe(nn.Sequential(nn.Linear(6, 6), Branch()), [1, 1], backend="aten")
    pipe.threads_per_stage = untraceable.threads_per_stage = 1
    with intra_op_threads(3):
        before = thread_counts(), thread_counts_of_a_new_thread()
        with pytest.raises(RuntimeError, match="cannot be traced"):
            untraceable(features())
        assert (thread_counts(), thread_counts_of_a_new_thread()) == before
        output = pipe(features())
        assert (thread_counts(), thread_counts_of_a_new_thread()) == before
        for action, run in (("1F1", lambda: pipe(features())), ("0B0", output.sum().backward)):
            inject_failure(pipe, action)
            with pytest.raises(ValueError, match="injected"):
                run()
            assert (thread_counts(), thread_counts_of_a_new_thread()) == before
        remove_faults(pipe)
        pipe(features()).sum().backward()
        assert (thread_counts(), thread_counts_of_a_new_thread()) == before


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

    settings = [(False, False), (True, True), (True, False), (False, True), (False, False)]
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
        for num_stages in (1, 3):
            with restored(model):
                y = pipeline(GPipe(model, [6] if num_stages == 1 else [2, 2, 2], chunks=4), x)
                assert unequal({"output": y, **dict(model.named_buffers())}, expected) == []
                assert y.is_inference()
    model, x = convolutions(), images()
    pipe = GPipe(model, [2, 2, 2], chunks=4)
    with restored(model), torch.inference_mode():
        assert pipe(x).is_inference()
        assert not any(b.is_inference() for b in model.buffers())
    assert unequal(pipeline_step(pipe, x), loop_step(model, x, 4)) == []


Ranges = list[tuple[str, int]]


def ranges_of(profiler: profile) -> Ranges:
    """Returns names and threads of the pipeline's profiler ranges."""
    return [(e.name, e.thread) for e in profiler.events() or [] if e.name.startswith("PP:")]


def test_the_profiler_sees_every_action_once() -> None:
    """A range has the action's name, runs in the stage's thread, and contains its operators."""
    pipe, x = GPipe(mlp(), [1, 1, 3], chunks=4, checkpoint="never"), features()
    pipe(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        pipe(x).sum().backward()
    schedule = fill_drain(3, 4, recomputed=())
    assert sorted(name for name, _ in ranges_of(profiler)) == sorted(f"PP:{a}" for a in schedule.order())
    threads = {(int(name[3]), thread) for name, thread in ranges_of(profiler)}
    assert len(threads) == len({thread for _, thread in threads}) == 3
    events = profiler.events() or []
    assert not {e.thread for e in events if e.name == "GPipeBackward"} & {thread for _, thread in threads}
    outer = [e.cpu_parent.name for e in events if e.name == "aten::tanh"]
    assert sorted(outer) == [f"PP:2F{m}" for m in range(4)]


def test_the_profiler_sees_only_actions_of_its_own_thread() -> None:
    pipe, x = GPipe(mlp(), [2, 3], chunks=2), features()
    pipe(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        pipe(x)
        with ThreadPoolExecutor(1) as other:
            other.submit(lambda: pipe(x).sum().backward()).result()
    pipe(x)
    assert sorted(name for name, _ in ranges_of(profiler)) == sorted(
        f"PP:{a}" for a in fill_drain(2, 2, backward=False).order()
    )


class OperatorRecorder(TorchDispatchMode):
    """Records every operator that PyTorch dispatches in the current thread."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_does_not_reach_the_workers(one_thread: None) -> None:
    model, x = mlp(), features()
    pipe = GPipe(model, [2, 3], chunks=2)
    expected = loop_step(model, x, 2)
    for recorder in (OperatorRecorder(), OperatorRecorder()):  # the first call traces
        with recorder:
            result = pipeline_step(pipe, x)
        assert unequal(result, expected) == []
    assert "cat" in recorder.names
    assert not {"addmm", "mm", "tanh", "tanh_backward"} & set(recorder.names)
