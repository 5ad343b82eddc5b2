"""What a trace sees of Python: randomness and time end it before they are asked, reads are noted."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast._extension import Observer
from gpipe_fast.trace.observe import line_of, reason_against
from gpipe_fast.trace.reads import names_of, reads_of
from gpipe_fast.trace.refuse import Untraceable
from gpipe_fast.trace.trace import Joint, trace

X = torch.randn(3, 4)
NUMBER = 2.0
SEEN: list[Any] = []


class Calling(nn.Module):
    """Calls a function beside its layer."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        self.function()
        y: Tensor = self.linear(x)
        return y


def traced(function: Callable[[], object]) -> Joint | Untraceable:
    return trace([nn.Tanh(), Calling(function)], [X])


def reason_for(function: Callable[[], object]) -> str:
    found = traced(function)
    assert isinstance(found, Untraceable)
    assert found.layer == 1
    return found.reason


def test_what_is_refused_does_not_happen(capsys: pytest.CaptureFixture[str]) -> None:
    state = random.getstate()
    assert "prints" in reason_for(lambda: print("once"))
    assert "random numbers" in reason_for(lambda: random.shuffle([1, 2, 3]))
    assert capsys.readouterr().out == ""
    assert random.getstate() == state


def test_a_layer_that_catches_the_refusal_is_refused() -> None:
    def catching() -> None:
        with contextlib.suppress(Exception):
            random.random()

    assert "random numbers" in reason_for(catching)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda: os.urandom(4), "random bytes from the operating system"),
        (lambda: open(os.devnull), "opens a file"),  # noqa: SIM115
        (lambda: sys.stderr.write(""), "calls the file method write"),
        (lambda: os.path.exists("/"), "does I/O or calls the operating system"),
        (lambda: os.environ.__setitem__("GPIPE_FAST_OTHER", "1"), "changes os.environ"),
        (lambda: logging.getLogger("gpipe_fast_test").warning("each time"), "logs messages"),
    ],
)
def test_effects_outside_of_the_program_are_refused(function: Callable[[], object], reason: str) -> None:
    assert reason in reason_for(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda: warnings.warn("shown once", stacklevel=1),
        lambda: io.StringIO().write("in memory"),
        lambda: [1].append(2),
        lambda: sorted({"a": 1}.items()),
        lambda: next(iter([1, 2])),
    ],
)
@pytest.mark.filterwarnings("ignore:shown once")
def test_what_has_no_effect_outside_is_traced(function: Callable[[], object]) -> None:
    assert isinstance(traced(function), Joint)


def test_a_context_variable_is_refused_for_good() -> None:
    """It has another value in the thread of a stage."""
    from contextvars import ContextVar

    variable = ContextVar("variable", default=1)
    found = traced(lambda: variable.get())
    assert isinstance(found, Untraceable)
    assert found.final
    assert "context variable" in found.reason


def test_a_profiler_of_the_users_is_put_back() -> None:
    calls: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        calls.append(event)

    sys.setprofile(profile)
    try:
        traced(lambda: None)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert calls


def test_other_threads_are_not_watched() -> None:
    """What draws there is not the layer's doing."""
    done = threading.Event()

    def draw() -> None:
        while not done.is_set():
            random.random()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        assert isinstance(traced(lambda: None), Joint)
    finally:
        done.set()
        thread.join()


def test_the_standard_library_acts_for_its_caller() -> None:
    """0 is PyTorch's code, 1 the user's, 2 the standard library's."""
    called: list[str] = []
    kinds = {"outer": 0, "user": 1, "library": 2}
    observer = Observer(
        lambda frame: kinds.get(frame.f_code.co_name, 0),
        lambda frame: called.append(frame.f_code.co_name),
        lambda function: called.append(function.__name__) or True,
    )

    def library() -> int:
        return abs(-1)

    def user() -> int:
        return library()

    def outer(function: Callable[[], int]) -> int:
        return function()

    observer.start()
    outer(library)
    outer(user)
    observer.stop()
    assert called == ["user", "library", "abs"]


def test_names_of_a_function() -> None:
    def function(x: Any) -> Any:
        import os.path as somewhere

        return somewhere, x.attribute.deeper, NUMBER, x["key"], SEEN.append

    names = names_of(function.__code__)
    assert set(names.globals) == {"NUMBER", "SEEN"}
    assert {"attribute", "deeper", "key", "append"} <= names.attributes
    assert names.imports == ("os.path",)
    assert not names.any_attribute
    assert names_of((lambda x: getattr(x, "a")).__code__).any_attribute  # noqa: B009


def test_what_was_read_is_known_after_the_trace() -> None:
    layer = Calling(lambda: NUMBER)
    assert reads_of(layer) is None
    trace([layer], [X])
    known = reads_of(layer)
    assert known is not None
    assert [entry.label for entry in known.entries.values()] == ["the global variable NUMBER"]
    assert {"linear", "function"} <= known.attributes


def test_the_line_of_an_error_is_the_users() -> None:
    def branching() -> None:
        if float(torch.ones(2, device="meta").sum()) > 0:
            raise AssertionError

    with pytest.raises(RuntimeError) as caught:
        branching()
    assert line_of(caught.value).startswith(" (test_observe.py, line ")
    assert "if float(torch.ones(2" in line_of(caught.value)
    assert reason_against(abs) is None


class Caching(nn.Module):
    """Computes something at its first call and keeps it: a number, or a tensor."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.cache: Any = None
        self.shared: dict[str, Any] = {}
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = self.make(x)
        return x * self.shared.setdefault("scale", self.cache)


def test_what_only_the_first_call_changes_is_kept() -> None:
    layer = Caching(lambda x: 0.5 * x.dim())
    assert isinstance(trace([layer], [X]), Joint)
    assert layer.cache == 1.0
    assert layer.shared == {"scale": 1.0}


def test_a_cache_of_tracing_tensors_is_put_back() -> None:
    layer = Caching(lambda x: x.mean())
    assert isinstance(trace([layer], [X]), Untraceable)
    assert layer.cache is None
    assert layer.shared == {}


def test_what_every_call_changes_is_put_back_to_what_it_was() -> None:
    layer = Calling(lambda: SEEN.append(1))
    SEEN.clear()
    found = trace([layer], [X])
    assert isinstance(found, Untraceable)
    assert found.reason == "its forward changes the global variable SEEN, a side effect"
    assert SEEN == []


class Scaled(torch.autograd.Function):
    """Scales the gradient by a number that only the backward reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * NUMBER


class Scaling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = Scaled.apply(x)
        return scaled


def test_what_a_backward_of_the_users_reads_is_known() -> None:
    layer = Scaling()
    assert isinstance(trace([layer], [X.clone().requires_grad_()]), Joint)
    known = reads_of(layer)
    assert known is not None
    assert "the global variable NUMBER" in [entry.label for entry in known.entries.values()]
