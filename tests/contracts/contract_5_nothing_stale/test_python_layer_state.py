"""Layers in Python over several calls: hooks, retained graphs, retracing, caches and garbage collection."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.runtime.stage import TRACING_LOCK
from tests.internals import cache_sizes, compiler_of, limited_caches, owned_objects
from tests.reference import (
    collect,
    gradient_like,
    leaf,
    loop_step,
    pipeline,
    pipeline_step,
    restored,
    unequal,
)
from tests.untraceable import (
    WIDTH,
    FunctionLayer,
    M,
    StatefulLayer,
    branch_on_data,
    features,
    model,
    without_warnings,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.smoke
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_second_backward_gives_the_same_gradients_and_buffers(checkpoint: str) -> None:
    layers = model(FunctionLayer(branch_on_data), StatefulLayer())
    pipe = GPipe(layers, [2, 4, 5], chunks=M, checkpoint=checkpoint)
    with without_warnings(), restored(layers):
        x = leaf(features())
        output = pipeline(pipe, x)
        output.backward(gradient_like(output), retain_graph=True)
        first = {n: p.grad.clone() for n, p in layers.named_parameters() if p.grad is not None}
        buffers = [b.clone() for b in layers.buffers()]
        layers.zero_grad()
        output.backward(gradient_like(output))
        for name, parameter in layers.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, first[name])
        assert all(map(torch.equal, layers.buffers(), buffers))


def test_a_trace_by_another_thread_is_no_change() -> None:
    """A trace replaces parameters for as long as it holds the lock of tracing."""

    class StartsTrace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.begun = threading.Event()

        def forward(self, x: Tensor) -> Tensor:
            self.begun.clear()
            threading.Thread(target=replace_parameter).start()
            self.begun.wait()
            return x

    def replace_parameter() -> None:
        table = layers[0]._parameters
        with TRACING_LOCK:
            weight = table["weight"]
            table["weight"] = nn.Parameter(torch.zeros(4, 4))
            starts.begun.set()
            time.sleep(0.2)
            table["weight"] = weight

    starts = StartsTrace()
    layers = nn.Sequential(nn.Linear(4, 4), starts).eval()
    pipe, x = GPipe(layers, [1, 1], chunks=1), torch.randn(2, 4)
    expected = layers[0](x)
    with without_warnings():
        for _ in range(3):  # the first call finds the layer that runs in Python
            assert torch.equal(pipe(x), expected)


def test_constants_that_never_repeat_stop_tracing_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next layers are traced for each number that a layer in Python returns, up to a limit."""

    class CountsCalls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = 0

        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            self.time += 1
            return x, self.time

    def divided_by_time(f: nn.Module, value: Any) -> Tensor:
        x, time = value
        return f(x) / time

    monkeypatch.setattr("gpipe_fast.runtime.planner.MAX_TRACES", 8)
    layers = nn.Sequential(CountsCalls(), FunctionLayer(divided_by_time))
    pipe = GPipe(layers, [1, 1], chunks=2, checkpoint="always")
    with without_warnings():
        for step in range(12):
            layers[0].time = 2 * step
            expected = loop_step(layers, features(4), 2)
            layers[0].time = 2 * step
            with restored(pipe):
                x = leaf(features(4))
                assert unequal(collect(pipe, x, pipe(x)), expected) == []
    assert 8 <= compiler_of(pipe).num_traces <= 8 + 4


@pytest.mark.parametrize("backend", ["auto", "eager", "aten"])
def test_a_deleted_pipeline_is_freed_by_reference_counts_alone(backend: str) -> None:
    """C++ segments refer to Python layers; the garbage collector would never find a cycle through them."""
    layers = model(nn.Identity() if backend == "aten" else FunctionLayer(branch_on_data))
    gc.collect()
    gc.disable()
    try:
        pipe = GPipe(layers, [2, 5], chunks=M, backend=backend)
        with without_warnings():
            for _ in range(3):
                pipeline_step(pipe, features())
        references = [weakref.ref(thing) for thing in (pipe, *owned_objects(pipe))]
        del pipe
        assert [ref() for ref in references] == [None] * len(references)
    finally:
        gc.enable()


def test_the_segment_caches_keep_the_latest_shapes() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), FunctionLayer(branch_on_data), nn.Linear(WIDTH, WIDTH))
    with without_warnings(), limited_caches(4):
        pipe = GPipe(layers, [1, 2], chunks=2, checkpoint="always")
        for length in [*range(2, 9)] * 2:
            x = features(4, length)
            assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == [], length
    by_stage, gradients = cache_sizes(pipe)
    assert gradients <= 4 * len(by_stage)
    assert all(0 < interpreted <= 4 and lowered <= 4 for interpreted, lowered in by_stage)
