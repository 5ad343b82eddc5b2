"""`GPipe.stream` against calls of the model, bit for bit; its errors, its back-pressure, and how it ends."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from gpipe_fast import GPipe
from tests.contracts.contract_1_same_bits.test_skip_connections import AddSkip, StashInput
from tests.internals import inject_delays, inject_failure, remove_faults
from tests.models import uneven_balance
from tests.reference import SEED
from tests.untraceable import FunctionLayer, StatefulLayer

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*stages idle"),
    pytest.mark.filterwarnings("ignore:.*in Python"),
]
WIDTH = 8


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        StashInput(),
        nn.Dropout(0.3),
        nn.Linear(WIDTH, WIDTH),
        AddSkip(),
        nn.Dropout(0.2),
    )


def pipe_of(model: nn.Sequential, num_stages: int = 2, **options: Any) -> GPipe:
    return GPipe(model, uneven_balance(len(model), num_stages), **options)


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
    with torch.no_grad():
        return [
            pipe(**x) if isinstance(x, dict) else pipe(*x) if type(x) is tuple else pipe(x) for x in items
        ]


def streamed(pipe: GPipe, items: Sequence[Any], depth: int | None = None) -> list[Any]:
    torch.manual_seed(SEED)
    return list(pipe.stream(iter(items), depth=depth))


def equal(one: Any, other: Any) -> bool:
    (found, spec), (expected, expected_spec) = tree_flatten(one), tree_flatten(other)
    return spec == expected_spec and all(
        torch.equal(a, b) and a.requires_grad == b.requires_grad if isinstance(a, Tensor) else a == b
        for a, b in zip(found, expected, strict=True)
    )


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
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


def test_a_long_stream_equals_calls(pipe: GPipe) -> None:
    """Its 1,201 micro-batches take two runs of the engine, and a mini-batch lies in both."""
    items = batches([1] + [6] * 600)
    assert equal(streamed(pipe, items), called(pipe, items))


# Layers in Python


def with_state() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), StatefulLayer(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), StatefulLayer()
    )


def state_of(model: nn.Sequential) -> dict[str, Any]:
    calls = {name: layer.calls for name, layer in model.named_modules() if isinstance(layer, StatefulLayer)}
    return calls | {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_layers_in_python_change_their_state_in_order(backend: str) -> None:
    model = with_state()
    items = [x.unsqueeze(1) for x in batches()]
    one = pipe_of(model, 3, chunks=2, backend=backend)
    other = pipe_of(copy.deepcopy(model), 3, chunks=2, backend=backend)
    assert equal(streamed(one, items), called(other, items))
    assert equal(state_of(model), state_of(other))


def functions(*layers: Callable[..., Any]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*map(FunctionLayer, layers))


# Buffers


@pytest.mark.parametrize("deferred", [False, True])
def test_a_stream_that_would_write_buffers_is_refused(deferred: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    pipe, items = pipe_of(model, 2, chunks=2, deferred_batch_norm=deferred), batches([6] * 4)
    before = state_of(model)
    with pytest.raises(RuntimeError, match=r"writes a buffer of shape \[8\].*call model.eval\(\)"):
        streamed(pipe, items)
    assert equal(state_of(model), before)
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
    model.insert(stage, FailsOnce())
    same = copy.deepcopy(model)
    pipe, other = (pipe_of(each, 3, chunks=2, backend="eager") for each in (model, same))
    found, error = results_and_error(pipe.stream(items, depth=depth))
    assert equal(found, called(other, items[:4]))
    assert isinstance(error, LookupError)
    if hasattr(error, "__notes__"):
        assert error.__notes__[0].startswith(f"in action {stage}F1: stage {stage}, layer {stage}")
    with pytest.raises(LookupError):
        other(items[4])
    assert equal(dict(model.named_buffers()), dict(same.named_buffers()))
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

    pipe, items = pipe_of(functions(endless, endless), backend="eager"), batches([6] * 4)
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


def test_calls_steps_and_streams_take_turns_with_a_stream(pipe: GPipe) -> None:
    """Those of other threads, and those between its results."""
    pipe.eval()
    items = batches([6, 4] * 30)
    expected = called(pipe, items)

    def work(number: int) -> list[Any]:
        with torch.no_grad():
            return [pipe(x) for x in items] if number % 2 else list(pipe.stream(items))

    with ThreadPoolExecutor(3) as pool:
        results = pool.map(work, range(3))
        inner, found = pipe.stream(items, depth=3), []
        for x, y in zip(items, pipe.stream(items, depth=4), strict=True):
            assert torch.equal(pipe(x), y)
            pipe.step(x, target=torch.zeros_like(x), loss_fn=F.mse_loss)
            found.append(next(inner))
    assert equal(found, expected)
    assert all(equal(result, expected) for result in results)


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
