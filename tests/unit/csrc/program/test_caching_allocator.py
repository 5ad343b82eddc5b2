"""The caching allocator: memory that operators allocate inside a program is reused by later operators."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast._extension import Arena
from gpipe_fast.lower.split import split
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole
from tests.stages import Runner, input_values, trace_joint

pytestmark = pytest.mark.usefixtures("one_thread")

# Layer norm allocates its result of 256 KiB; the products write into the arena.
WIDTH, ROWS = 256, 256


def norms() -> list[nn.Module]:
    return [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)]


def test_the_next_run_reuses_memory_that_was_freed_and_not_that_of_returned_tensors() -> None:
    layers, x = norms(), torch.randn(ROWS, WIDTH)
    joint, arena = trace_joint(layers, x), Arena()
    forward = Runner(split(joint, 0.0).forward, layers, arena=arena)
    values = input_values(layers, joint, x)
    (output,) = forward(values).values()
    copy, cached = output.clone(), arena.cached_bytes
    assert x.nbytes <= cached < 2 * x.nbytes  # the first norm's result; the last norm's result was returned
    for _ in range(3):
        assert torch.equal(*forward(values).values(), copy)
        assert arena.cached_bytes == cached
    values[GraphPort(GraphRole.INPUT, 0)] = torch.randn(ROWS, WIDTH)
    forward(values)
    assert torch.equal(output, copy)
    del output
    assert arena.cached_bytes == cached


def test_saved_tensors_outlive_their_pipeline_and_may_be_freed_by_another_thread() -> None:
    pipe = GPipe(nn.Sequential(*norms()), [3], chunks=2, checkpoint="never")
    output = pipe(torch.randn(ROWS, WIDTH))
    losses = [output.sum()]
    del pipe, output
    gc.collect()
    losses[0].backward()
    thread = threading.Thread(target=losses.clear)
    thread.start()
    thread.join()
    assert not losses
