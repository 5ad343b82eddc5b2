"""The display of long first calls: a bar on a terminal, one line elsewhere, nothing if it is not wanted."""

from __future__ import annotations

import io
import logging
import os
import pty
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe, progress
from gpipe_fast.progress import Work
from tests.reference import loop_step, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")

LINE = (
    "tracing stage 0 of 2, layers 0 to 2 for the first call with inputs of shape (8, 4) in this mode; later "
    "calls reuse the result; expect 2 more slow calls, the last one slowest, if shapes change"
)


def model() -> GPipe:
    torch.manual_seed(0)
    return GPipe(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))), [3, 2], chunks=2, backend="aten")


def prepare(pipe: GPipe | None = None) -> None:
    (pipe or model()).prepare(torch.empty(8, 4, device="meta"))


@pytest.fixture(autouse=True)
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.fixture
def in_first_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Returns a function that makes work wait, in its first step, until a method of the display has run.

    So the display, which has no delay then, does not depend on time.
    """

    def wait_for(method: str) -> None:
        shown, displays = threading.Event(), list[Any]()
        start, enter_step, show = (
            progress._Display.start,
            Work.enter_step,
            getattr(progress._Display, method),
        )

        def enter_and_wait(work: Work, *arguments: Any) -> None:
            enter_step(work, *arguments)
            while displays:
                start(displays.pop())
                assert shown.wait(20)

        def show_and_note(display: Any, *arguments: Any) -> Any:
            result = show(display, *arguments)
            shown.set()
            return result

        monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
        monkeypatch.setattr(progress._Display, "start", lambda display: displays.append(display))
        monkeypatch.setattr(Work, "enter_step", enter_and_wait)
        monkeypatch.setattr(progress._Display, method, show_and_note)

    return wait_for


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the handlers of pytest, so that logging is as in a program that does not configure it."""
    monkeypatch.setattr(logging.getLogger("gpipe_fast"), "hasHandlers", lambda: False)


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


@pytest.mark.usefixtures("unconfigured")
def test_one_line_is_written_if_there_is_no_terminal(
    in_first_step: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    in_first_step("_write_line")
    prepare()
    assert capsys.readouterr().err == f"gpipe_fast: {LINE}\n"
    assert not threads_of_displays()


def test_the_line_is_logged_if_logging_is_configured(
    in_first_step: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    in_first_step("_write_line")
    with caplog.at_level(logging.INFO, "gpipe_fast"):
        prepare()
    assert caplog.record_tuples == [("gpipe_fast", logging.INFO, LINE)]
    assert not capsys.readouterr().err


def test_a_bar_is_drawn_on_a_terminal_and_cleared(in_first_step: Callable[[str], None]) -> None:
    pytest.importorskip("tqdm")
    in_first_step("_begin_bar")
    with terminal() as written:
        prepare()
        assert not threads_of_displays()
        sys.stderr.write("next")
    *drawn, blank, after = b"".join(written).decode().split("\r")
    assert "gpipe_fast: tracing stage 0 of 2, layers 0 to 2:   0%|" in "".join(drawn)
    assert (blank.strip(), after) == ("", "next")
    assert "\n" not in "".join(drawn)


@pytest.mark.usefixtures("unconfigured")
def test_a_line_takes_the_place_of_a_bar_without_tqdm(
    in_first_step: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    in_first_step("_write_line")
    with terminal() as written:
        prepare()
    assert b"".join(written).decode().strip() == f"gpipe_fast: {LINE}"


@pytest.mark.parametrize(("name", "value"), [(progress.VARIABLE, "0"), ("LOCAL_RANK", "1")])
def test_nothing_is_shown_if_a_variable_says_so(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(progress._Display, "start", lambda display: pytest.fail("a display starts"))
    prepare()


@pytest.mark.usefixtures("unconfigured")
def test_short_work_is_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY_SECONDS", 600.0)
    prepare()
    assert not capsys.readouterr().err
    assert not threads_of_displays()


def test_a_cached_plan_starts_no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, x = model(), torch.randn(8, 4)
    pipe(x)
    monkeypatch.setattr(progress, "Work", lambda *arguments: pytest.fail("work begins"))
    pipe(x)
    with pytest.raises(pytest.fail.Exception):
        pipe(torch.randn(6, 4))


def test_a_trace_does_not_see_the_display(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``backend='aten'``, a layer that drew, logged or read the clock would be an error."""
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 1e-4)
    pipe, x = model(), torch.randn(8, 4)
    expected = loop_step(nn.Sequential(*pipe), x, 2)
    with terminal():
        assert unequal(pipeline_step(pipe, x), expected) == []


@pytest.mark.usefixtures("unconfigured")
def test_a_standard_error_that_fails_does_not_disturb_the_work(
    in_first_step: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    in_first_step("_run")
    with open(os.devnull, "w") as stream, mock.patch.object(sys, "stderr", stream):
        stream.close()
        prepare()
    assert not errors


@pytest.mark.usefixtures("unconfigured")
def test_the_line_is_written_to_any_object(
    in_first_step: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream:
        written = ""

        def write(self, text: str) -> None:
            self.written += text

    stream = Stream()
    in_first_step("_run")
    monkeypatch.setattr(sys, "stderr", stream)
    prepare()
    assert stream.written == f"gpipe_fast: {LINE}\n"


def test_the_line_is_logged_if_standard_error_is_closed(
    in_first_step: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    stream.close()
    in_first_step("_run")
    monkeypatch.setattr(sys, "stderr", stream)
    with caplog.at_level(logging.INFO, "gpipe_fast"):
        prepare()
    assert [record.message for record in caplog.records] == [LINE]


def test_the_line_says_how_many_slow_calls_to_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[Work] = []
    monkeypatch.setattr(progress._Display, "start", lambda display: works.append(display._work))
    pipe = model()
    for rows in (8, 6, 10, 12):
        pipe(torch.randn(rows, 4))
    beginning = (
        " for the first call with inputs of shape ({}, 4) in this mode; later calls reuse the result{}"
    )
    assert [work.purpose for work in works] == [
        beginning.format(8, "; expect 2 more slow calls, the last one slowest, if shapes change"),
        beginning.format(6, "; expect 1 more slow call, the slowest one, if shapes change"),
        beginning.format(10, "; the next ones are faster, unless another size varies, such as the batch's"),
        beginning.format(12, ""),
    ]


def test_the_line_says_that_every_shape_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[Work] = []
    monkeypatch.setattr(progress._Display, "start", lambda display: works.append(display._work))
    monkeypatch.setenv("GPIPE_FAST_DISABLE", "templates")
    model()(torch.randn(8, 4))
    assert works[0].purpose.endswith("; later calls reuse the result; each new shape takes as long")


class Scale(nn.Module):
    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x * number


def test_the_line_blames_a_number_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[Work] = []
    monkeypatch.setattr(progress._Display, "start", lambda display: works.append(display._work))
    pipe = GPipe(nn.Sequential(Scale(), nn.Linear(4, 4)), [1, 1])
    for number in (2, 3):
        pipe(torch.randn(8, 4), number)
    assert "if shapes change" in works[0].purpose
    assert works[1].purpose == (
        " for the first call with inputs of shape (8, 4) and the number 3 in this mode; later calls reuse "
        "the result; each new number takes as long"
    )


def test_the_line_of_prepared_calls_is_about_the_present_one(monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[Work] = []
    monkeypatch.setattr(progress._Display, "start", lambda display: works.append(display._work))
    model().prepare(torch.randn(8, 4), also=[torch.randn(6, 4)])
    (work,) = works
    assert "shape (6, 4)" in work.purpose


def test_the_line_lists_the_first_shapes() -> None:
    assert progress.title_of(torch.empty(n, 2) for n in (1, 1, 2)) == "shape (1, 2), (2, 2)"
    assert progress.title_of(torch.empty(n) for n in range(9)) == "shape (0,), (1,), (2,), (3,), ..."
    assert progress.title_of([torch.empty(2, 3), torch.tensor(1)]) == "shape (2, 3)"
    assert progress.title_of([torch.tensor(1)]) == "shape ()"


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


# What is said, and how far the bar is


def test_the_steps_of_three_stages_advance_the_bar() -> None:
    work = Work("working")
    work.enter_stages([2, 1, 3], 0)
    said = []
    for stage in ((0, 2), (2, 1), (3, 3)):
        work.enter_step("tracing", stage)
        said.append((work.doing, round(work.fraction, 2)))
        work.enter_layer()
        work.enter_layer()
    for stage in ((0, 2), (2, 1), (3, 3)):
        work.enter_step("splitting", stage)
        work.enter_step("lowering", None)
        said.append((work.doing, round(work.fraction, 2)))
    assert said == [
        ("tracing stage 0 of 3, layers 0 to 1", 0.0),
        ("tracing stage 1 of 3, layer 2", 0.2),
        ("tracing stage 2 of 3, layers 3 to 5", 0.3),
        ("lowering stage 0 of 3, layers 0 to 1", 0.69),
        ("lowering stage 1 of 3, layer 2", 0.78),
        ("lowering stage 2 of 3, layers 3 to 5", 0.94),
    ]


def test_layers_advance_the_bar_within_a_trace() -> None:
    work = Work("working")
    work.enter_stages([4], 0)
    work.enter_step("tracing", (0, 4))
    fractions = []
    for _ in range(20):
        work.enter_layer()
        fractions.append(work.fraction)
    assert fractions == sorted(fractions)
    assert fractions[:3] == pytest.approx([0.0, 0.05, 0.1])
    assert fractions[-1] == pytest.approx(0.6)


def test_the_bar_never_goes_back() -> None:
    """Stages are traced again for the gradients' layouts, from the last to the first."""
    work = Work("working")
    work.enter_stages([1, 1], 0)
    work.enter_step("tracing", (1, 1))
    before = work.fraction
    work.enter_step("tracing", (0, 1))
    assert work.doing == "tracing stage 0 of 2, layer 0"
    assert work.fraction == before


def test_several_calls_share_the_bar() -> None:
    work = Work("preparing calls")
    work.enter_call(1, 4)
    work.enter_stages([1, 1], 0)
    work.enter_step("splitting", (1, 1))
    assert work.fraction == pytest.approx((1 + 0.8) / 4)


def test_kernels_are_counted_within_a_stage_or_by_themselves() -> None:
    with progress.first_call([1, 1]) as _, progress.working("compiling Triton kernels") as work:
        progress.step("splitting", 1)
        before = work.fraction
        work.enter_part("compiling Triton kernels")
        work.count(1, 4)
        assert work.doing == "compiling Triton kernels for stage 1 of 2, layer 1 (1 of 4)"
        assert before < work.fraction < 1
    with progress.working("compiling Triton kernels", ", once for this machine") as work:
        work.count(1, 4)
        assert (work.doing, work.fraction) == ("compiling Triton kernels (1 of 4)", 0.25)


def test_measured_layers_do_not_fill_the_bar_of_a_call() -> None:
    with progress.working("preparing calls"), progress.working("measuring layers") as work:
        work.count(3, 3)
        assert (work.doing, work.fraction) == ("measuring layers (3 of 3)", 0.0)


def test_steps_outside_of_work_are_ignored() -> None:
    progress.step("tracing", 0)
    progress.layer()
