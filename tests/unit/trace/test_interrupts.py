"""Ctrl-C waits while a context manager is entered or left, and no longer."""

from __future__ import annotations

import signal
import textwrap
import threading
from pathlib import Path

import pytest

from gpipe_fast.trace import interrupts
from gpipe_fast.trace.interrupts import interrupts_between_contexts
from tests.programs import run_python


class Interrupted:
    """A context manager that receives SIGINT while it is left, and notes whether it was left."""

    is_left = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        signal.raise_signal(signal.SIGINT)
        self.note()

    def note(self) -> None:
        self.is_left = True


def wait() -> None:
    """Waits for a signal, which ends the wait."""
    for _ in range(1000):
        threading.Event().wait(0.02)
    pytest.fail("no signal has arrived")


def test_a_signal_is_handled_after_a_context_manager_is_left() -> None:
    interrupted = Interrupted()
    with pytest.raises(KeyboardInterrupt), interrupts_between_contexts():
        with interrupted:
            pass
        wait()
    assert interrupted.is_left


def test_a_signal_is_handled_at_once_elsewhere() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_between_contexts():
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the signal waits")


def test_a_context_manager_that_is_never_left_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_MAX_PAUSES", 3)

    class Endless(Interrupted):
        def note(self) -> None:
            wait()

    with pytest.raises(KeyboardInterrupt), interrupts_between_contexts(), Endless():
        pass


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
