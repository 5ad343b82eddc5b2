"""`GPipe.stream` against calls of the model, bit for bit; its errors, its back-pressure, and how it ends."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe, replicate
from gpipe_fast.layers.skip import pop, skippable, stash
from tests.internals import inject_delays, inject_failure, remove_faults
from tests.reference import SEED
from tests.untraceable import FunctionLayer, StatefulLayer, segments_by_stage

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*stages idle"),
    pytest.mark.filterwarnings("ignore:.*in Python"),
]
WIDTH = 8
BALANCES = {1: [6], 2: [3, 3], 3: [2, 2, 2], 4: [2, 1, 2, 1]}


@skippable(stash=["side"])
class Stashes(nn.Module):
    """A layer with a skip connection to a later one."""

    def forward(self, x: Tensor) -> Any:
        yield stash("side", x * 2)
        return x


@skippable(pop=["side"])
class Pops(nn.Module):
    """Adds the skip tensor."""

    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("side"))


class Several(nn.Module):
    """Takes and returns several tensors."""

    def forward(self, x: Tensor, y: Tensor, *, scale: Tensor | None = None) -> dict[str, Any]:
        return {"sum": x + y if scale is None else x + y * scale, "x": [x, None]}


class Joins(nn.Module):
    """Returns a tuple."""

    def forward(self, value: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return value["sum"].sin(), value["x"][0] * 2


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        Stashes(),
        nn.Dropout(0.3),
        nn.Linear(WIDTH, WIDTH),
        Pops(),
        nn.Dropout(0.2),
    )


def pipe_of(model: nn.Sequential, num_stages: int = 2, **options: Any) -> GPipe:
    balance = BALANCES[num_stages] if len(model) == 6 else None
    if balance is None:
        balance = [len(model) - num_stages + 1] + [1] * (num_stages - 1)
    return GPipe(model, balance, devices=["cpu"] * num_stages, **options)


@pytest.fixture(scope="module")
def traced_pipe() -> GPipe:
    """Three stages, with dropout, for tests that do not change the layers."""
    return pipe_of(layers(), 3, chunks=2)


@pytest.fixture
def pipe(traced_pipe: GPipe) -> Iterator[GPipe]:
    yield traced_pipe.train()
    remove_faults(traced_pipe)


def batches(sizes: Sequence[int] = (6, 4, 6, 1, 6, 6)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, WIDTH, generator=generator) for size in sizes]


def called(pipe: GPipe, items: Sequence[Any]) -> list[Any]:
    """Returns the results of calls."""
    torch.manual_seed(SEED)
    results = []
    with torch.no_grad():
        for item in items:
            if isinstance(item, dict):
                results.append(pipe(**item))
            else:
                results.append(pipe(*item) if type(item) is tuple else pipe(item))
    return results


def streamed(pipe: GPipe, items: Sequence[Any], depth: int | None = None) -> list[Any]:
    torch.manual_seed(SEED)
    return list(pipe.stream(iter(items), depth=depth))


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other) and one.requires_grad == other.requires_grad
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("num_stages", BALANCES)
def test_results_equal_those_of_calls(num_stages: int, chunks: int) -> None:
    """With skip connections, changing batch sizes, and dropout in train mode."""
    pipe, items = pipe_of(layers(), num_stages, chunks=chunks), batches()
    for training in (True, False):
        expected = called(pipe.train(training), items)
        state = torch.get_rng_state()
        for depth in (1, 2, None):
            assert equal(streamed(pipe, items, depth), expected)
            assert torch.equal(torch.get_rng_state(), state)
    assert [y.requires_grad for y in expected] == [False] * len(items)


def test_arguments_and_results_are_nested_like_those_of_calls() -> None:
    pipe = pipe_of(nn.Sequential(Several(), Joins()), chunks=2)
    a, b, scale = torch.randn(4, 3), torch.randn(4, 3), torch.randn(3)
    items = [(a, b), {"x": b, "y": a}, {"x": a, "y": a, "scale": replicate(scale)}, (b[:2], a[:2])]
    found = streamed(pipe, items)
    assert equal(found, called(pipe, items))
    assert type(found[0]) is tuple


def test_a_model_without_layers_returns_its_arguments() -> None:
    items = batches()
    assert equal(list(GPipe(nn.Sequential(), []).stream(items)), items)


def test_no_mini_batches_give_no_results() -> None:
    pipe = pipe_of(layers())
    before = num_threads()
    assert list(pipe.stream([])) == []
    assert num_threads() == before


def test_a_long_stream_equals_calls(pipe: GPipe) -> None:
    """Its 1,201 micro-batches take two runs of the engine, and a mini-batch lies in both."""
    items = batches([1] + [6] * 600)
    assert equal(streamed(pipe, items), called(pipe, items))


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.extended) for n in range(1, 9))])
def test_results_do_not_depend_on_timing(number: int, pipe: GPipe) -> None:
    items = batches([6, 6, 4, 6, 4] * 4)
    expected = called(pipe, items)
    for depth in (1, 3, 9):
        inject_delays(pipe, number, 2000)
        assert equal(streamed(pipe, items, depth), expected)


@pytest.mark.parametrize("mode", ["inference mode", "autocast"])
def test_the_modes_of_the_caller_apply(mode: str, pipe: GPipe) -> None:
    items = batches([6, 4, 6, 6])
    scope = torch.inference_mode() if mode == "inference mode" else torch.autocast("cpu", torch.bfloat16)
    with scope:
        found, expected = streamed(pipe, items), called(pipe, items)
        assert equal(found, expected)
    assert [y.is_inference() for y in found] == [y.is_inference() for y in expected]
    assert [y.dtype for y in found] == [y.dtype for y in expected]


def test_the_caller_keeps_its_grad_mode_between_results(pipe: GPipe) -> None:
    for y in pipe.stream(batches()):
        assert torch.is_grad_enabled()
        assert not y.requires_grad


# Layers in Python


def with_state() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), StatefulLayer(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), StatefulLayer()
    )


def state_of(model: nn.Sequential) -> dict[str, Any]:
    calls = {name: layer.calls for name, layer in model.named_modules() if isinstance(layer, StatefulLayer)}
    return buffers_of(model) | calls


def buffers_of(model: nn.Sequential) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_layers_in_python_change_their_state_in_order(backend: str) -> None:
    model = with_state()
    items = [x.unsqueeze(1) for x in batches()]
    one = pipe_of(model, 3, chunks=2, backend=backend)
    other = pipe_of(copy.deepcopy(model), 3, chunks=2, backend=backend)
    assert equal(streamed(one, items), called(other, items))
    assert equal(state_of(model), state_of(other))


def draw_noise(f: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = f(x)
    return F.dropout(y, 0.5) if float(y.sum()) < 1e9 else y


def noisy(*functions: Callable[..., Any]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(FunctionLayer(function) for function in functions))


def test_random_layers_in_python_draw_as_in_calls() -> None:
    pipe, items = pipe_of(noisy(draw_noise, draw_noise, draw_noise), 3, chunks=2), batches()
    expected = called(pipe, items)
    assert equal(streamed(pipe, items), expected)
    assert equal(streamed(pipe, items, depth=9), expected)


def test_layers_around_one_in_python_are_lowered_during_the_first_mini_batches() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), FunctionLayer(draw_noise), nn.Linear(WIDTH, WIDTH))
    pipe = pipe_of(model, 2)
    streamed(pipe, batches([6] * 5), depth=4)
    assert segments_by_stage(pipe) == [[(0, 1, True), (1, 2, False)], [(0, 1, True)]]


def test_a_layer_in_python_that_changes_others_is_noticed() -> None:
    other = nn.Linear(WIDTH, WIDTH)

    def change(f: nn.Module, x: Tensor) -> Tensor:
        if float(x[0, 0]) == 7:
            other.extra = True  # type: ignore[assignment]
        y: Tensor = f(x)
        return y

    pipe = pipe_of(nn.Sequential(FunctionLayer(change), other))
    items = batches([6] * 6)
    items[4][0, 0] = 7
    with pytest.raises(RuntimeError, match="changed what other layers read"):
        streamed(pipe, items, depth=2)


# Buffers


@pytest.mark.parametrize("deferred", [False, True])
def test_a_stream_that_would_write_buffers_is_refused(deferred: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    pipe, items = pipe_of(model, 2, chunks=2, deferred_batch_norm=deferred), batches([6] * 4)
    before = buffers_of(model)
    with pytest.raises(RuntimeError, match=r"writes a buffer of shape \[8\].*call model.eval\(\)"):
        streamed(pipe, items)
    assert equal(buffers_of(model), before)
    pipe.eval()
    assert equal(streamed(pipe, items), called(pipe, items))


# Errors


class FailsOnce(nn.Module):
    """Raises in its tenth call: in the second micro-batch of the fifth mini-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 10:
            raise LookupError("as planned")
        return x


def results_and_error(stream: Iterator[Any]) -> tuple[list[Any], BaseException | None]:
    results: list[Any] = []
    try:
        for result in stream:
            results.append(result)
    except Exception as error:
        return results, error
    return results, None


@pytest.mark.parametrize("depth", [1, 3, 20])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_error_of_a_layer_is_raised_after_the_results_before(stage: int, depth: int) -> None:
    model, items = with_state(), [x.unsqueeze(1) for x in batches([6] * 8)]
    model.insert(2 * stage, FailsOnce())
    same = copy.deepcopy(model)
    pipe, other = (pipe_of(each, 3, chunks=2, backend="eager") for each in (model, same))
    found, error = results_and_error(pipe.stream(items, depth=depth))
    assert equal(found, called(other, items[:4]))
    assert isinstance(error, LookupError)
    if hasattr(error, "__notes__"):
        assert error.__notes__[0].startswith(f"in action {stage}F1: stage {stage}, layer {2 * stage}")
    with pytest.raises(LookupError):
        other(items[4])
    assert equal(buffers_of(model), buffers_of(same))
    assert equal(called(pipe, items[:1]), called(other, items[:1]))


@pytest.mark.parametrize("action", ["0F11", "1RECV_F11", "1SEND_F11", "2F11"])
def test_an_injected_error_is_raised_at_its_mini_batch(action: str, pipe: GPipe) -> None:
    items = batches([6] * 12)
    expected = called(pipe, items)
    for number in range(3):
        inject_failure(pipe, action, seed=number, max_delay_us=500)
        torch.manual_seed(SEED)
        found, error = results_and_error(pipe.stream(items, depth=1 + 3 * number))
        assert equal(found, expected[:5])
        assert isinstance(error, ValueError)
        assert f"in action {action[:-2]}1" in str(error)
        remove_faults(pipe)
    assert equal(streamed(pipe, items), expected)


def bad_items() -> Iterator[Tensor]:
    yield from batches([6, 6, 6])
    raise LookupError("of the iterable")


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_errors_of_inputs_and_of_the_iterable_come_after_the_results_before(depth: int, pipe: GPipe) -> None:
    found, error = results_and_error(pipe.stream(bad_items(), depth=depth))
    assert len(found) == 3
    assert str(error) == "of the iterable"
    for bad, message in ((torch.randn(4, 5), "shapes"), (torch.randn(()), "0-dim"), ({}, ""), ("x", "")):
        items = [*batches([6, 6, 6]), bad, *batches([6])]
        found, error = results_and_error(pipe.stream(items, depth=depth))
        assert len(found) == 3, bad
        assert isinstance(error, (RuntimeError, TypeError, ValueError))
        assert message in str(error)
    assert equal(streamed(pipe, batches()), called(pipe, batches()))


def late_then_early(f: nn.Module, x: Tensor) -> Tensor:
    """Draws for negative inputs, after a while."""
    if float(x[0, 0]) > 0:
        return x
    time.sleep(0.2)
    return F.dropout(x, 0.5)


def test_draws_in_another_order_than_that_of_calls_are_an_error() -> None:
    def early(f: nn.Module, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) if float(x[0, 0]) > 0 else x

    pipe = pipe_of(noisy(early, late_then_early), backend="eager")
    negative, positive = -torch.ones(4, WIDTH), torch.ones(4, WIDTH)
    assert len(streamed(pipe, [negative, positive], depth=1)) == 2
    with pytest.raises(RuntimeError, match="mini-batch 0 of the stream draws its first random number after"):
        streamed(pipe, [negative, positive], depth=2)


# Back-pressure


@pytest.mark.parametrize("depth", [1, 2, 5, None])
def test_a_stream_reads_no_more_than_its_depth_ahead(depth: int | None, pipe: GPipe) -> None:
    num_read = 0

    def reading() -> Iterator[Tensor]:
        nonlocal num_read
        for x in batches([6] * 12):
            num_read += 1
            yield x

    stream = pipe.stream(reading(), depth=depth)
    assert num_read == 0
    for num_yielded, _ in enumerate(stream):
        assert num_read == min(12, num_yielded + (depth or 6))


# How a stream ends


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
@pytest.mark.parametrize("way", ["break", "close", "del", "throw", "exhaust", "error"])
def test_a_stream_that_ends_leaves_no_thread(way: str, pipe: GPipe) -> None:
    items = batches([6] * 9)
    expected = called(pipe, items)
    gc.collect()
    before = num_threads()
    inject_delays(pipe, 0, 2000)
    stream: Any = pipe.stream([*items, "bad"] if way == "error" else items, depth=4)
    next(stream)
    assert num_threads() == before + 1
    if way == "break":
        for _ in stream:
            break
    if way in ("break", "del"):
        del stream
    elif way == "close":
        stream.close()
    elif way == "throw":
        with pytest.raises(LookupError):
            stream.throw(LookupError())
    elif way == "exhaust":
        assert len(list(stream)) == 8
    else:
        with pytest.raises(TypeError):
            list(stream)
    assert num_threads() == before
    assert equal(called(pipe, items), expected)


@pytest.mark.parametrize("place", ["layer", "stage"])
def test_ctrl_c_ends_a_stream(place: str) -> None:
    """Also if it comes while a layer runs in Python, in a worker, which receives no signals."""
    is_running, is_endless = threading.Event(), [place == "layer"]

    def endless(f: nn.Module, x: Tensor) -> Tensor:
        is_running.set()
        end = time.monotonic() + (30 if is_endless[0] and float(x[0, 0]) == 7 else 0)
        while time.monotonic() < end:
            pass
        y: Tensor = f(x)
        return y

    pipe, items = pipe_of(noisy(endless, endless), backend="eager"), batches([6] * 4)
    expected = called(pipe, items)
    items[2][0, 0] = 7
    is_running.clear()
    if place == "stage":
        inject_delays(pipe, 0, 10_000_000)
        is_running.set()

    def interrupt() -> None:
        is_running.wait()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(20):
            streamed(pipe, items)
    thread.join()
    remove_faults(pipe)
    is_endless[0] = False
    assert equal(streamed(pipe, items[:2]), expected[:2])


def test_an_abandoned_stream_restores_the_state_of_layers_in_python() -> None:
    """Mini-batches that were complete have changed it; with a depth of 1, these are the yielded ones."""
    model, items = with_state(), [x.unsqueeze(1) for x in batches([6] * 6)]
    same = copy.deepcopy(model)
    pipe, other = (pipe_of(each, 3, chunks=2, backend="eager") for each in (model, same))
    stream = pipe.stream(items, depth=1)
    for _ in range(3):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    called(other, items[:3])
    assert equal(state_of(model), state_of(same))


# Other calls meanwhile


def test_calls_steps_and_streams_within_a_stream_take_turns(pipe: GPipe) -> None:
    pipe.eval()
    items = batches([6] * 6)
    expected = called(pipe, items)
    found = []
    inner = pipe.stream(items, depth=3)
    for x, y in zip(items, pipe.stream(items, depth=4), strict=True):
        assert torch.equal(pipe(x), y)
        pipe.step(x, target=torch.zeros_like(x), loss_fn=F.mse_loss)
        found.append(next(inner))
    assert equal(found, expected)
    assert equal(streamed(pipe, items), expected)


def test_calls_of_other_threads_take_turns_with_a_stream(pipe: GPipe) -> None:
    pipe.eval()
    items = batches([6, 4] * 60)
    expected = called(pipe, items)
    results: dict[int, list[Any]] = {}

    def work(number: int) -> None:
        with torch.no_grad():
            results[number] = [pipe(x) for x in items] if number % 2 else list(pipe.stream(items))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    found = streamed(pipe, items)
    for thread in threads:
        thread.join()
    assert equal(found, expected)
    assert all(equal(results[number], expected) for number in range(4))


def test_settings_and_layers_may_change_between_results() -> None:
    pipe, items = pipe_of(layers(), 2).eval(), batches([6] * 8)
    expected = called(pipe, items)
    for number, (y, wanted) in enumerate(zip(pipe.stream(items, depth=2), expected, strict=True)):
        assert torch.equal(y, wanted)
        if number == 2:
            pipe.chunks, pipe.threads_per_stage = 3, 1
        if number == 4:
            pipe.balance = [2, 4]
        if number == 6:
            pipe.capture = False


def test_a_stream_can_be_recorded(pipe: GPipe) -> None:
    items = batches([6] * 6)
    with pipe.recording() as recording:
        assert len(streamed(pipe, items)) == 6
    assert recording.span() > 0
