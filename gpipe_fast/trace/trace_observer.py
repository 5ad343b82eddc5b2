"""Observes the Python code that runs in a trace: records its reads, and stops at side effects.

A forward that draws from Python's or NumPy's generators, reads the clock, writes a file or changes state
outside its layer does so in every call; its trace would do so once. The observer raises `Unrepeatable` before
such a call takes effect.
"""

from __future__ import annotations

import contextlib
import functools
import io
import linecache
import os
import random
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType, CodeType, FrameType, ModuleType
from typing import Any

from torch import Tensor, nn

from gpipe_fast._extension import Observer
from gpipe_fast.trace.fingerprint import hidden_state_message
from gpipe_fast.trace.python_reads import NamespaceEntry, PythonReads, readable_names
from gpipe_fast.trace.python_values import (
    CONCURRENCY_MODULES,
    ValueKind,
    is_assumed_constant,
    is_stdlib,
    root_package,
    value_kind,
)
from gpipe_fast.trace.restore_point import GENERATOR, Change, RestorePoint
from gpipe_fast.trace.traceability import Untraceable

# The values of Code in csrc/bindings/bindings_observer.cpp.
_OPAQUE, _USER, _TRANSPARENT, _REPORTED, _IMPORTING = range(5)

_IMPORT_MODULES = frozenset({"importlib", "_frozen_importlib", "_frozen_importlib_external", "zipimport"})
# A message that is shown only once is not a side effect of every call.
_LOG_ONCE_FUNCTIONS = frozenset({"warning_once", "warn_once", "info_once"})

# Methods that copy a tensor's elements out of PyTorch's sight; `Tensor.__array__` calls `numpy`.
_ELEMENT_READS = frozenset({"tolist", "numpy"})
# C modules whose functions read the clock, or do input and output.
_CLOCK_MODULES = frozenset({"time", "_datetime"})
_IO_MODULES = frozenset(
    {"posix", "nt", "_socket", "_io", "io", "select", "_posixsubprocess", "mmap", "fcntl"}
)
_PURE_FUNCTIONS = frozenset({"fspath", "getpid", "_path_normpath", "register_at_fork", "text_encoding"})
_REFUSED_BUILTINS = {
    "print": "it prints",
    "input": "it asks for input",
    "open": "it opens a file",
    "breakpoint": "it stops in the debugger",
}


class Unrepeatable(Exception):
    """A layer has a side effect that a trace would have once instead of in every call."""


def _classify_frame(frame: FrameType) -> int:
    """Returns how a frame's code is observed, according to its module's name."""
    if frame.f_code is Tensor.__array__.__code__:
        return _TRANSPARENT
    name = frame.f_globals.get("__name__")
    return _OPAQUE if frame.f_code.co_name in _LOG_ONCE_FUNCTIONS else _classify_module(name)


@functools.lru_cache(maxsize=4096)
def _classify_module(name: object) -> int:
    root = root_package(name)
    if name is None or root.startswith("namedtuple_"):  # generated, and run on its caller's behalf
        return _TRANSPARENT
    if not is_assumed_constant(name):
        return _USER
    if root in _IMPORT_MODULES:
        return _IMPORTING
    if root == "os":
        return _REPORTED
    return _TRANSPARENT if is_stdlib(name) and root != "warnings" else _OPAQUE


def untraceable_reason(function: Any) -> str | None:
    """Returns why a call of a C function cannot be traced; None if it can."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    if isinstance(owner, random.Random):
        return "it draws from Python's random numbers"
    if isinstance(owner, ModuleType):
        if owner.__name__ in _CLOCK_MODULES:
            return f"it reads the clock (time.{name})"
        if name == "urandom":
            return "it draws random bytes from the operating system"
        if owner.__name__ in ("builtins", "io", "_io") and name in _REFUSED_BUILTINS:
            return _REFUSED_BUILTINS[name]
        if owner.__name__ in _IO_MODULES and name not in _PURE_FUNCTIONS:
            return f"it calls {owner.__name__}.{name}, which does I/O or calls the operating system"
    elif isinstance(owner, Tensor):
        if name in _ELEMENT_READS:
            return f"it reads the elements of a tensor (Tensor.{name}), which may differ in every call"
    elif isinstance(owner, type):
        if owner.__module__ == "datetime" and name in ("now", "utcnow", "today"):
            return f"it reads the clock (datetime.{name})"
    elif isinstance(owner, io.IOBase) and not isinstance(owner, (io.StringIO, io.BytesIO)):
        return f"it calls the file method {name}"
    elif type(owner).__module__ == "_contextvars":
        return (
            "it reads or sets a context variable, whose value differs in the pipeline's threads; pass the "
            "value through the layers, or set it as an attribute"
        )
    elif value_kind(owner) is ValueKind.HIDDEN:
        return _hidden_call_message(owner, name)
    return None


def _hidden_call_message(owner: object, method: str) -> str:
    cls = type(owner)
    return (
        f"it calls {cls.__module__}.{cls.__qualname__}.{method}, of an object whose state cannot be compared"
    )


class TraceObserver:
    """The Python side of one trace: reads, changes and side effects of the layers.

    Attributes:
        layer: index of the layer that is running; None outside of the layers.
        reads: the Python state that each layer's forward reads.
        untraceable: the reason why the layers cannot be traced; None while no reason is known.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._before = RestorePoint(layers)
        self._numpy = _numpy_generator()
        if self._numpy is not None:
            entry = NamespaceEntry({"numpy.random": self._numpy}, "numpy.random", "numpy.random")
            self._before.save(entry)
        self._changed_by: dict[str, int | None] = {}
        self.layer: int | None = None
        self.reads = [PythonReads() for _ in layers]
        self.untraceable: Untraceable | None = None

    @contextlib.contextmanager
    def observing(self) -> Iterator[Observer]:
        """Observes the code that this thread runs in the block; yields the observer, which can be paused."""
        observer = Observer(_classify_frame, self._on_frame, self._on_call)
        observer.start()
        try:
            yield observer
        finally:
            observer.stop()

    def leave_layer(self) -> None:
        """Attributes new changes outside of the layers to the layer that just ran."""
        for change in self._before.outside_changes():
            self._changed_by.setdefault(change.label, self.layer)

    def changes(self) -> list[Change]:
        """Returns what the trace changed, with the layers that changed it."""
        return [change._replace(layer=self._layer_of(change)) for change in self._before.changes()]

    def keep_caches(self) -> bool:
        """Keeps the trace's changes if they may be caches that the first call fills; returns whether it did.

        Changes by random generators and changes that contain tensors of the trace are not kept.
        """
        is_cache = not any(change.label.startswith(GENERATOR) for change in self._before.changes())
        if is_cache and not self._before.holds_tracing_tensors():
            self._before.restore_tensors()
            return True
        return False

    def restore(self) -> None:
        """Restores what the trace changed."""
        self._before.restore()

    def _layer_of(self, change: Change) -> int | None:
        return self._changed_by.get(change.label) if change.layer is None else change.layer

    def mark_unrepeatable(self, layer: int | None) -> None:
        """Records that a second run of a layer, or of all if None, may differ from the first."""
        for index, reads in enumerate(self.reads):
            if layer is None or index == layer:
                reads.repeatable = False

    def _current_reads(self) -> Sequence[PythonReads]:
        return self.reads if self.layer is None else [self.reads[self.layer]]

    def _on_frame(self, frame: FrameType) -> None:
        code = frame.f_code
        kind = _classify_frame(frame)
        found: list[NamespaceEntry] = []
        for reads in self._current_reads():
            if kind == _REPORTED:
                found += self._environment(reads, frame)
            elif kind == _USER:
                found += reads.add_function(code, frame.f_globals)
                backward = _backward_of(frame)
                if backward is not None:
                    found += reads.add_function(backward.__code__, backward.__globals__)
            else:
                reads.add_attributes(code)
        if kind == _TRANSPARENT:
            self._refuse_hidden_state(frame)
        if code.co_name == "_log" and frame.f_globals.get("__name__") == "logging":
            self.mark_unrepeatable(self.layer)
            self._refuse("it logs messages")
        for entry in found:
            self._before.save(entry)
        if kind == _USER and self._before.iterators:
            self._refuse_iterators(code)

    def _refuse_iterators(self, code: CodeType) -> None:
        """Stops the trace before a function runs that names an iterator, which it would advance."""
        names = readable_names(code)
        known = {*names.globals, *names.attributes, *code.co_freevars}
        for change, value in self._before.iterators:
            if change.label.replace(".", " ").split()[-1] in known:
                self.mark_unrepeatable(self.layer)
                self._refuse(hidden_state_message(change.label, value))

    def _refuse_hidden_state(self, frame: FrameType) -> None:
        """Stops the trace before a method of a standard library object runs that other threads change."""
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        is_concurrent = root_package(frame.f_globals.get("__name__")) in CONCURRENCY_MODULES
        if is_concurrent and value_kind(owner) is ValueKind.HIDDEN:
            self.mark_unrepeatable(self.layer)
            self._refuse(_hidden_call_message(owner, code.co_name))

    def _environment(self, reads: PythonReads, frame: FrameType) -> list[NamespaceEntry]:
        if "_Environ" not in getattr(frame.f_code, "co_qualname", "_Environ"):
            return []
        if frame.f_code.co_name in ("__setitem__", "__delitem__"):
            self._refuse("it changes os.environ")
        if frame.f_code.co_name == "__getitem__":
            return reads.add_environment(frame.f_locals["key"])
        return reads.add_environment(None) if frame.f_code.co_name in ("__iter__", "__len__", "copy") else []

    def _on_call(self, function: BuiltinFunctionType) -> bool:
        reason = untraceable_reason(function)
        if reason is not None:
            if not isinstance(getattr(function, "__self__", None), random.Random):
                self.mark_unrepeatable(self.layer)
            self._refuse(reason)
        return True

    def _refuse(self, reason: str) -> None:
        if self.untraceable is None:
            self.untraceable = Untraceable(self.layer, reason, is_fatal="context variable" in reason)
        raise Unrepeatable(reason)


def _backward_of(frame: FrameType) -> Any:
    """Returns the backward of the ``autograd.Function`` whose forward a frame runs; else None.

    Autograd runs the backward later, when the observer does not see it.
    """
    names = frame.f_code.co_varnames
    if frame.f_code.co_name != "forward" or not names:
        return None
    context = frame.f_locals.get(names[0])
    function = getattr(type(context), "_forward_cls", None)
    backward = getattr(function, "backward", None)
    return backward if hasattr(backward, "__code__") else None


def _numpy_generator() -> Any:
    """Returns NumPy's global generator; None if the program has not imported ``numpy.random``."""
    module = sys.modules.get("numpy.random")
    return None if module is None else module.mtrand._rand


def user_code_line(error: BaseException) -> str:
    """Returns the user's line that raised, as " (model.py, line 12: if x.sum() > 0:)"; "" if none did."""
    found = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if _classify_frame(frame) == _USER:
            path = frame.f_code.co_filename
            text = linecache.getline(path, number).strip()
            found = f" ({os.path.basename(path)}, line {number}{': ' if text else ''}{text})"
    return found
