"""The display of long first calls: a line that is rewritten, or written once, or nothing."""

from __future__ import annotations

import io
import logging
import os
import pty
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from unittest import mock

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe, progress
from gpipe_fast.progress import Work
from tests.reference import loop_step, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")

LINE = "tracing layer 0 for a test"


def model() -> GPipe:
    torch.manual_seed(0)
    return GPipe(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))), [3, 2], chunks=2, backend="aten")


def prepare() -> None:
    model().prepare(torch.empty(8, 4, device="meta"))


def show() -> None:
    """Shows work as the thread of a display does that has waited long enough; looks at it once."""
    ended = mock.Mock(wait=mock.Mock(side_effect=[False, False, True]))
    progress._display(Work("tracing layer 0", " for a test"), ended, at_once=False)


@pytest.fixture(autouse=True)
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """Lists the work for which a display starts, and shows none."""
    found: list[Work] = []
    monkeypatch.setattr(progress, "_started", lambda work, *_: found.append(work))
    return found


@contextmanager
def terminal() -> Iterator[list[bytes]]:
    """Makes standard error a terminal in a block; the list contains what was written after the block."""
    control, terminal = pty.openpty()
    written: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the terminal is closed
            while True:
                written.append(os.read(control, 4096))

    thread = threading.Thread(target=read)
    thread.start()
    with open(terminal, "w") as stream, mock.patch.object(sys, "stderr", stream):
        yield written
    thread.join()
    os.close(control)


def threads_of_displays() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gpipe_fast progress"]


def test_one_line_is_written_if_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a program that does not configure logging, which pytest does."""
    monkeypatch.setattr(logging.getLogger("gpipe_fast"), "hasHandlers", lambda: False)
    show()
    assert capsys.readouterr().err == f"gpipe_fast: {LINE}\n"
    stream = mock.Mock(spec=["write"])
    monkeypatch.setattr(sys, "stderr", stream)
    show()
    assert "".join(call.args[0] for call in stream.write.call_args_list) == f"gpipe_fast: {LINE}\n"
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    show()


def test_the_line_is_logged_if_logging_is_configured(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, "gpipe_fast"):
        show()
        assert not capsys.readouterr().err
        monkeypatch.setattr(sys, "stderr", None)
        show()
    assert caplog.record_tuples == [("gpipe_fast", logging.INFO, LINE)] * 2


def test_a_line_is_rewritten_on_a_terminal_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "41")
    with terminal() as written:
        show()
        sys.stderr.write("next")
    *drawn, blank, after = filter(None, b"".join(written).decode().split("\r"))
    assert drawn == [f"{'gpipe_fast: tracing layer 0 (0 s)':40}"] * 2
    assert (blank, after) == (" " * 40, "next")


def test_nothing_is_shown_if_a_variable_says_so(monkeypatch: pytest.MonkeyPatch, works: list[Work]) -> None:
    for name, value in ((progress.VARIABLE, "0"), ("LOCAL_RANK", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            prepare()
    assert not works


def test_short_work_is_silent(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY_SECONDS", 600.0)
    with caplog.at_level(logging.INFO, "gpipe_fast"):
        prepare()
    assert not caplog.records
    assert not threads_of_displays()


def test_a_cached_plan_starts_no_display(works: list[Work]) -> None:
    pipe, x = model(), torch.randn(8, 4)
    pipe(x)
    pipe(x)
    assert len(works) == 1


def test_a_trace_does_not_see_the_display(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``backend='aten'``, a layer that drew, logged or read the clock would be an error."""
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 1e-4)
    pipe, x = model(), torch.randn(8, 4)
    expected = loop_step(nn.Sequential(*pipe), x, 2)
    with terminal():
        assert unequal(pipeline_step(pipe, x), expected) == []


def test_the_line_says_how_many_slow_calls_to_expect(
    works: list[Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = model()
    for rows in (8, 6, 10, 12):
        pipe(torch.randn(rows, 4))
    purpose = (
        " for the first call with inputs of shape ({}, 4){} in this mode; later calls reuse the result{}"
    )
    assert [work.purpose for work in works] == [
        purpose.format(8, "", "; expect 2 more slow calls, the last one slowest, if shapes change"),
        purpose.format(6, "", "; expect 1 more slow call, the slowest one, if shapes change"),
        purpose.format(10, "", "; the next ones are faster, unless another size varies, such as the batch's"),
        purpose.format(12, "", ""),
    ]
    pipe = GPipe(nn.Sequential(Scale(), nn.Linear(4, 4)), [1, 1])
    for number in (2, 3):
        pipe(torch.randn(8, 4), number)
    assert "if shapes change" in works[-2].purpose
    assert works[-1].purpose == purpose.format(8, " and the number 3", "; each new number takes as long")
    monkeypatch.setenv("GPIPE_FAST_DISABLE", "templates")
    model()(torch.randn(8, 4))
    assert works[-1].purpose.endswith("; later calls reuse the result; each new shape takes as long")


class Scale(nn.Module):
    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x * number


def test_the_line_of_prepared_calls_is_about_the_present_one(works: list[Work]) -> None:
    model().prepare(torch.randn(8, 4), also=[torch.randn(6, 4)])
    (work,) = works
    assert "shape (6, 4)" in work.purpose


def test_an_error_ends_the_display() -> None:
    with pytest.raises(KeyError), progress.working("working"):
        raise KeyError
    assert not threads_of_displays()
    with pytest.raises(KeyboardInterrupt), progress.first_call([1]):
        raise KeyboardInterrupt
    assert not threads_of_displays()


def test_a_fork_does_not_inherit_the_lock_of_a_drawing() -> None:
    """The child lacks the thread that draws, so nobody would release the lock."""
    is_drawing = threading.Event()

    def draw() -> None:
        with progress._drawing:
            is_drawing.set()
            threading.Event().wait(0.1)

    thread = threading.Thread(target=draw)
    thread.start()
    assert is_drawing.wait(60)
    child = os.fork()
    if not child:
        os._exit(0 if progress._drawing.acquire(timeout=10) else 1)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()


def test_the_steps_name_the_stage_and_its_layers() -> None:
    work, said = Work("working"), []
    work.enter_stages([2, 1, 3], 0)
    for name, stage in (
        ("tracing", (0, 2)),
        ("splitting", (2, 1)),
        ("lowering", None),
        ("splitting", (3, 3)),
    ):
        work.enter_step(name, stage)
        said.append(work.doing)
    assert said == [
        "tracing stage 0 of 3, layers 0 to 1",
        "splitting stage 1 of 3, layer 2",
        "lowering stage 1 of 3, layer 2",
        "splitting stage 2 of 3, layers 3 to 5",
    ]


def test_kernels_are_counted_within_a_stage_or_by_themselves() -> None:
    with progress.first_call([1, 1]) as _, progress.working("working"):
        progress.step("splitting", 1)
        with progress.working("compiling Triton kernels") as work:
            work.count(1, 4)
            assert work.doing == "compiling Triton kernels for stage 1 of 2, layer 1 (1 of 4)"
    with progress.working("preparing calls"), progress.working("measuring layers") as work:
        work.count(3, 3)
        assert work.doing == "measuring layers (3 of 3)"
