"""Ctrl-C waits for the end of a block, or for a place where the block allows it."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import pytest

from gpipe_fast.trace import interrupts
from gpipe_fast.trace.interrupts import handle_interrupt, interrupts_deferred
from tests.programs import run_python


def test_a_signal_is_handled_at_the_end_of_the_block() -> None:
    is_completed = False
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        is_completed = True
    assert is_completed


def test_a_signal_is_handled_where_the_block_allows_it() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        handle_interrupt()
        signal.raise_signal(signal.SIGINT)
        handle_interrupt()
        pytest.fail("the signal waits")


def test_a_signal_is_handled_once() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    handle_interrupt()
    with interrupts_deferred():
        pass


def test_a_block_that_does_not_end_can_be_interrupted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_MAX_SECONDS", -1.0)
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second signal waits")


PROGRAM = """
    import signal, sys, torch
    from torch import nn
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from gpipe_fast import GPipe

    def in_backward(frame):
        while frame is not None and frame.f_code is not torch.autograd.grad.__code__:
            frame = frame.f_back
        return frame is not None

    def trace(frame, event, argument):
        if frame.f_code is FunctionalTensorMode.__exit__.__code__ and in_backward(frame):
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)

    model = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), [2, 1], chunks=8)
    sys.settrace(trace)
    try:
        model.prepare(torch.empty(8, 4, device="meta"))
    except KeyboardInterrupt:
        print("interrupted")
    model(torch.ones(8, 4)).square().mean().backward()
"""


def test_ctrl_c_between_the_modes_of_a_traced_backward_does_not_end_the_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(PROGRAM))
    done = run_python(str(script), warning="ignore")
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
