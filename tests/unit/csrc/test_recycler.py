"""Memory that operators allocate inside a program and that the next ones take over."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast._extension import Arena
from gpipe_fast.lower.split import split
from gpipe_fast.trace.trace import Port, Role
from tests.stages import Runner, given, joint_of

pytestmark = pytest.mark.usefixtures("one_thread")

# Layer norm returns what it made, 256 KiB of it; the products write into the arena.
WIDTH, ROWS = 256, 256


def norms() -> list[nn.Module]:
    return [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)]


def test_the_next_run_takes_what_the_last_one_freed() -> None:
    layers, x = norms(), torch.randn(ROWS, WIDTH)
    joint, arena = joint_of(layers, x), Arena()
    forward = Runner(split(joint, 0.0).forward, layers, arena=arena)
    values = given(layers, joint, x)
    first = forward(values)
    kept = arena.recycled_bytes
    assert x.nbytes <= kept < 2 * x.nbytes  # the inner norm's result; the outer one's has left
    for _ in range(3):
        again = forward(values)
        assert arena.recycled_bytes == kept
        assert all(torch.equal(again[port], value) for port, value in first.items())


def test_what_leaves_is_not_the_recyclers() -> None:
    layers, x = norms(), torch.randn(ROWS, WIDTH)
    joint, arena = joint_of(layers, x), Arena()
    forward = Runner(split(joint, 0.0).forward, layers, arena=arena)
    values = given(layers, joint, x)
    (output,) = forward(values).values()
    copied = output.clone()
    values[Port(Role.INPUT, 0)] = torch.randn(ROWS, WIDTH)
    forward(values)
    assert torch.equal(output, copied)
    kept = arena.recycled_bytes
    del output
    assert arena.recycled_bytes == kept


def test_saved_tensors_outlive_their_pipeline_and_may_be_freed_by_another_thread() -> None:
    pipe = GPipe(nn.Sequential(*norms()), [3], chunks=2, checkpoint="never")
    output = pipe(torch.randn(ROWS, WIDTH))
    held = [output.sum()]
    del pipe, output
    gc.collect()
    held[0].backward()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert not held
