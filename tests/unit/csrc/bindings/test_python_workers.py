"""Ctrl-C while a layer runs in Python, in a worker, which receives no signals."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, is_recomputing
from gpipe_fast.runtime.python_layers import PythonLayers
from tests.reference import gradient_like, leaf, loop_step, pipeline_step, unequal
from tests.sampling import seed

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, M = 6, 4


class Endless(nn.Module):
    """Loops for up to 30 s in its forward or in its backward, as ``loops_in`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_looping, self.loops_in = nn.Linear(WIDTH, WIDTH), threading.Event(), ""

    def _loop(self, current: str) -> None:
        if current == self.loops_in:
            self.is_looping.set()
            end = time.monotonic() + 30
            while time.monotonic() < end:
                pass

    def forward(self, x: Tensor) -> Tensor:
        self._loop("forward")
        y: Tensor = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: self._loop("backward"))
        return y


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_sigint_ends_a_python_layer_and_the_next_step_is_correct(phase: str) -> None:
    endless = Endless()
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), endless, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2))
    x = torch.randn(8, WIDTH)
    expected = loop_step(layers, x, M)
    pipe = GPipe(layers, [2, 2], chunks=M, checkpoint="never", backend="eager")
    assert unequal(pipeline_step(pipe, x), expected) == []
    before = {name: value.clone() for name, value in layers.state_dict().items()}

    def send() -> None:
        assert endless.is_looping.wait(20)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    endless.loops_in = phase
    sender.start()
    begin = time.monotonic()
    with warnings.catch_warnings(), pytest.raises(KeyboardInterrupt):
        warnings.simplefilter("ignore")
        output = pipe(leaf(x))
        output.backward(gradient_like(output))
    assert time.monotonic() - begin < 25
    sender.join()
    assert all(p.grad is None for p in layers.parameters())
    endless.loops_in = ""
    if phase == "forward":
        assert all(torch.equal(value, before[name]) for name, value in layers.state_dict().items())
    layers.load_state_dict(before)
    assert unequal(pipeline_step(pipe, x), expected) == []


class Normalizes(nn.Module):
    """Has buffers, one of which its forward replaces, and asks for its phase, so that it is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        is_recomputing()
        self.num_calls = self.num_calls + 1
        return self.norm(x)


@contextlib.contextmanager
def interrupt_in_recompute(number: int) -> Iterator[list[int]]:
    """Raises KeyboardInterrupt where Python looks for it: at entries of functions, and after C functions.

    It is raised at this place, counted from 1, of the last backward of stage 1. Yields how many are left.
    """
    left = [number]

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_return"):
            left[0] -= 1
            if left[0] == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    backward = PythonLayers.backward

    def profiled(layers: PythonLayers, *args: Any) -> Any:
        if args[-1] != "1I0":  # the last backward of stage 1
            return backward(layers, *args)
        sys.setprofile(interrupt)
        try:
            return backward(layers, *args)
        finally:
            sys.setprofile(None)

    with mock.patch.object(PythonLayers, "backward", profiled):
        yield left


def test_ctrl_c_anywhere_in_a_recomputing_backward_changes_no_state() -> None:
    """A sample of the places is drawn anew for each commit."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Normalizes(), nn.Linear(WIDTH, 2))
    hooks = [p.register_hook(lambda gradient: gradient) and p._backward_hooks for p in layers.parameters()]
    pipe = GPipe(layers, [1, 2], chunks=2, checkpoint="always", backend="eager")
    x, before, left, step = torch.randn(8, WIDTH), copy.deepcopy(layers.state_dict()), [0], 24
    number = -random.Random(seed()).randrange(step)
    expected = pipeline_step(pipe, x)
    while left[0] <= 0:
        number += step
        output = pipe(leaf(x))
        tensors = {name: (b, b.clone()) for name, b in layers.named_buffers()}
        with interrupt_in_recompute(number) as left, contextlib.suppress(KeyboardInterrupt):
            output.backward(gradient_like(output))
        for name, b in layers.named_buffers():
            assert b is tensors[name][0], (number, name)
            assert torch.equal(b, tensors[name][1]), (number, name)
        assert [p._backward_hooks for p in layers.parameters()] == hooks, number
        layers.load_state_dict(before)
        layers.zero_grad()
    assert unequal(pipeline_step(pipe, x), expected) == []
