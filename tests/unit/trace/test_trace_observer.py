"""How a trace observes Python: it refuses randomness, time and I/O before they run, and records reads."""

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
from gpipe_fast.trace.joint_graph import JointGraph
from gpipe_fast.trace.python_reads import readable_names, reads_of
from gpipe_fast.trace.trace import trace
from gpipe_fast.trace.trace_observer import untraceable_reason, user_code_line
from gpipe_fast.trace.traceability import Untraceable

X = torch.randn(3, 4)
NUMBER = 2.0
SEEN: list[Any] = []


class CallsFunction(nn.Module):
    """A linear layer whose forward also calls `function`."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        self.function()
        y: Tensor = self.linear(x)
        return y


def trace_layer_calling(function: Callable[[], object]) -> JointGraph | Untraceable:
    return trace([nn.Tanh(), CallsFunction(function)], [X])


def refusal_reason(function: Callable[[], object]) -> str:
    result = trace_layer_calling(function)
    assert isinstance(result, Untraceable)
    assert result.layer == 1
    return result.reason


def test_a_refused_side_effect_is_not_executed(capsys: pytest.CaptureFixture[str]) -> None:
    state = random.getstate()
    assert "prints" in refusal_reason(lambda: print("once"))
    assert "random numbers" in refusal_reason(lambda: random.shuffle([1, 2, 3]))
    assert capsys.readouterr().out == ""
    assert random.getstate() == state


def test_a_layer_that_suppresses_the_refusal_is_still_refused() -> None:
    def draw_suppressing_errors() -> None:
        with contextlib.suppress(Exception):
            random.random()

    assert "random numbers" in refusal_reason(draw_suppressing_errors)


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
def test_external_side_effects_are_refused(function: Callable[[], object], reason: str) -> None:
    assert reason in refusal_reason(function)


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
def test_calls_without_external_side_effects_are_traced(function: Callable[[], object]) -> None:
    assert isinstance(trace_layer_calling(function), JointGraph)


def test_reading_a_context_variable_is_refused_permanently() -> None:
    """A stage's thread has another context, in which the variable may have another value."""
    from contextvars import ContextVar

    variable = ContextVar("variable", default=1)
    result = trace_layer_calling(lambda: variable.get())
    assert isinstance(result, Untraceable)
    assert result.is_fatal
    assert "context variable" in result.reason


def test_the_users_profile_function_is_restored() -> None:
    calls: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        calls.append(event)

    sys.setprofile(profile)
    try:
        trace_layer_calling(lambda: None)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert calls


def test_other_threads_are_not_observed() -> None:
    """A random draw in another thread is no side effect of the traced layer."""
    done = threading.Event()

    def draw() -> None:
        while not done.is_set():
            random.random()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        assert isinstance(trace_layer_calling(lambda: None), JointGraph)
    finally:
        done.set()
        thread.join()


def test_standard_library_frames_are_observed_only_under_user_code() -> None:
    """Frame kinds: 0 is PyTorch's code, 1 the user's, 2 the standard library's."""
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


def test_a_code_object_lists_the_names_that_it_may_read() -> None:
    def function(x: Any) -> Any:
        import os.path as somewhere

        return somewhere, x.attribute.deeper, NUMBER, x["key"], SEEN.append

    names = readable_names(function.__code__)
    assert set(names.globals) == {"NUMBER", "SEEN"}
    assert {"attribute", "deeper", "key", "append"} <= names.attributes
    assert names.imports == ("os.path",)
    assert not names.any_attribute
    assert readable_names((lambda x: getattr(x, "a")).__code__).any_attribute  # noqa: B009


def test_a_trace_records_the_globals_that_a_layer_reads() -> None:
    layer = CallsFunction(lambda: NUMBER)
    assert reads_of(layer) is None
    trace([layer], [X])
    recorded = reads_of(layer)
    assert recorded is not None
    assert [entry.label for entry in recorded.entries.values()] == ["the global variable NUMBER"]
    assert {"linear", "function"} <= recorded.attributes


def test_the_reported_line_of_an_error_is_in_user_code() -> None:
    def branching() -> None:
        if float(torch.ones(2, device="meta").sum()) > 0:
            raise AssertionError

    with pytest.raises(RuntimeError) as caught:
        branching()
    assert user_code_line(caught.value).startswith(f" ({os.path.basename(__file__)}, line ")
    assert "if float(torch.ones(2" in user_code_line(caught.value)
    assert untraceable_reason(abs) is None


class CachesFirstCall(nn.Module):
    """Caches what `make` returns at the first call: a number or a tensor."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.cache: Any = None
        self.shared: dict[str, Any] = {}
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = self.make(x)
        return x * self.shared.setdefault("scale", self.cache)


def test_a_cache_filled_by_the_first_call_is_kept() -> None:
    layer = CachesFirstCall(lambda x: 0.5 * x.dim())
    assert isinstance(trace([layer], [X]), JointGraph)
    assert layer.cache == 1.0
    assert layer.shared == {"scale": 1.0}


def test_a_cache_of_tracing_tensors_is_undone() -> None:
    layer = CachesFirstCall(lambda x: x.mean())
    assert isinstance(trace([layer], [X]), Untraceable)
    assert layer.cache is None
    assert layer.shared == {}


def test_a_side_effect_of_every_call_is_undone_and_refused() -> None:
    layer = CallsFunction(lambda: SEEN.append(1))
    SEEN.clear()
    result = trace([layer], [X])
    assert isinstance(result, Untraceable)
    assert result.reason == "its forward changes the global variable SEEN, a side effect"
    assert SEEN == []


class ScaleGradient(torch.autograd.Function):
    """Scales the gradient by a number that only the backward reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * NUMBER


class ScalesGradient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = ScaleGradient.apply(x)
        return scaled


def test_a_trace_records_the_globals_that_a_custom_backward_reads() -> None:
    layer = ScalesGradient()
    assert isinstance(trace([layer], [X.clone().requires_grad_()]), JointGraph)
    recorded = reads_of(layer)
    assert recorded is not None
    assert "the global variable NUMBER" in [entry.label for entry in recorded.entries.values()]
