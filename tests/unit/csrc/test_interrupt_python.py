"""Ctrl-C while a layer runs in Python, in a worker, which receives no signals."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.reference import gradient_like, leaf, loop_step, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, M = 6, 4


class Endless(nn.Module):
    """Loops for up to 30 s in its forward or in its backward, as ``loops_in`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.is_looping = threading.Event()
        self.loops_in = ""
        self.timed_out = False

    def _loop(self, current: str) -> None:
        if current != self.loops_in:
            return
        self.is_looping.set()
        end = time.monotonic() + 30
        while time.monotonic() < end:
            pass
        self.timed_out = True

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
    assert time.monotonic() - begin < 10
    sender.join()
    assert not endless.timed_out
    assert all(p.grad is None for p in layers.parameters())
    endless.loops_in = ""
    if phase == "forward":
        assert all(torch.equal(value, before[name]) for name, value in layers.state_dict().items())
    layers.load_state_dict(before)
    assert unequal(pipeline_step(pipe, x), expected) == []
