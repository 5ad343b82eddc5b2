"""Runs Triton kernels that are launched on the fake CUDA runtime, in Triton's interpreter.

`register` tells from which kernel a cubin was compiled; a launch finds it by the cubin's bytes. The process
must run with TRITON_INTERPRET=1, so it cannot compile: another process makes the cubins (compile_kernels.py).

A launch runs on the calling thread, or on the runtime's own thread if work is deferred. The interpreter's
state is global, so a lock serializes the launches. The interpreter's bf16 is corrected (bfloat16.py). The
bytes that a launch reads and writes are logged for the race detector.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import _normalize_ty

from gpipe_fast.fuse import cubins
from gpipe_fast.lower.launch import KernelLaunch
from tests.fake_cuda import bfloat16, pairwise

_NUMPY_TYPES = {
    "i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "u1": np.bool_, "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "fp16": np.float16, "fp32": np.float32, "fp64": np.float64,
}  # fmt: skip
_Array = npt.NDArray[Any]
# Triton appends two pointers to every kernel's parameters.
_NUM_SCRATCH_POINTERS = 2
_EXIT_STATUS_AFTER_FAILURE = 70


class _Parameter(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint16), ("size", ctypes.c_uint16))


class _LaunchRecord(ctypes.Structure):
    """LaunchRecord of runtime/kernels.cpp."""

    _fields_ = (
        ("image", ctypes.c_int64),
        ("name", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("num_parameters", ctypes.c_int),
        ("parameters", ctypes.POINTER(_Parameter)),
        ("arguments", ctypes.c_void_p),
        ("traced", ctypes.c_void_p),
    )


_RUNNER_TYPE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_LaunchRecord))


class _Trace:
    """The memory that one launch reads and writes on a stream."""

    def __init__(self, library: ctypes.CDLL, stream: int) -> None:
        self._library, self._stream = library, ctypes.c_void_p(stream)
        self._captured = bool(library.fake_cuda_capturing(self._stream))
        self._accesses: dict[tuple[bool, int], list[_Array]] = {}

    def access(self, pointers: _Array, mask: _Array, size: int, writes: bool) -> None:
        """Records an access to elements of `size` bytes, before it happens."""
        addresses = pointers[mask]
        self._accesses.setdefault((writes, size), []).append(addresses)
        if writes and self._captured:
            for begin, length in _ranges(addresses, size):
                self._library.fake_cuda_save(self._stream, ctypes.c_void_p(begin), ctypes.c_size_t(length))

    def report(self) -> None:
        """Tells the runtime all recorded accesses."""
        for (writes, size), addresses in sorted(self._accesses.items(), key=lambda item: item[0]):
            for begin, length in _ranges(np.concatenate(addresses), size):
                self._library.fake_cuda_access(
                    self._stream, ctypes.c_void_p(begin), ctypes.c_size_t(length), int(writes)
                )


def _ranges(addresses: _Array, size: int) -> Iterator[tuple[int, int]]:
    """Yields the consecutive bytes of elements of `size` bytes: their address and length."""
    if not addresses.size:
        return
    found = np.unique(addresses)
    ends = np.flatnonzero(np.diff(found) > size)
    firsts, lasts = np.append(0, ends + 1), np.append(ends, len(found) - 1)
    for first, last in zip(firsts, lasts, strict=True):
        yield int(found[first]), int(found[last]) + size - int(found[first])


@dataclass(frozen=True)
class _Registered:
    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: Mapping[str, Any]

    def arguments(self, record: _LaunchRecord) -> dict[str, Any]:
        """Returns the kernel's arguments, from the bytes that the launch copied."""
        places = record.parameters[: record.num_parameters]
        types = [*(type_ for _, type_ in self.signature), *["*i8"] * _NUM_SCRATCH_POINTERS]
        sizes = [_np_type(type_).itemsize for type_ in types]
        if sizes != [place.size for place in places]:
            received = [place.size for place in places]
            raise ValueError(f"{self.kernel.__name__}: the signature has {sizes} bytes, the cubin {received}")
        values = [
            _tensor(ctypes.string_at(record.arguments + place.offset, place.size), type_)
            for type_, place in zip(types, places, strict=True)
        ]
        if any(pointer.handle.data.any() for pointer in values[len(self.signature) :]):
            raise ValueError(f"{self.kernel.__name__}: a pointer to scratch memory is not null")
        names = [name for name, _ in self.signature]
        found = dict(zip(names, values, strict=False))
        return found | {name: self._constant(name) for name in self.kernel.arg_names if name not in found}

    def _constant(self, name: str) -> Any:
        value = self.constants[name]
        annotation = self.kernel.fn.__annotations__.get(name)
        is_constexpr = annotation is not None and _normalize_ty(annotation) == "constexpr"
        return value if is_constexpr else interpreter._implicit_cvt(value)


def _np_type(type_: str) -> np.dtype[Any]:
    if type_.startswith("*"):
        return np.dtype(np.uint64)
    return np.dtype(np.uint16 if type_ == "bf16" else _NUMPY_TYPES[type_])


def _tensor(data: bytes, type_: str) -> Any:
    triton_type = tl.str_to_ty(type_, None)
    value = np.frombuffer(data, _np_type(type_)).copy()
    return tl.tensor(interpreter.TensorHandle(value, triton_type), triton_type)


class _Interpreter:
    """Triton's interpreter, which runs one launch at a time."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._lock = threading.RLock()
        self._kernels: dict[int, _Registered] = {}
        self._patched: set[Any] = set()
        self._trace: _Trace | None = None
        self._library = ctypes.CDLL(None)
        self._library.fake_cuda_make_runnable.restype = ctypes.c_int64
        self._runner = _RUNNER_TYPE(self._run)  # the runtime calls it as long as the process lives
        bfloat16.correct(interpreter, tl)
        pairwise.correct(interpreter)
        self._patch()
        self._library.fake_cuda_set_runner(self._runner)
        atexit.register(self._close)

    def register(self, image: bytes, registered: _Registered) -> None:
        number = self._library.fake_cuda_make_runnable(image)
        if number < 0:
            raise ValueError(f"the image of {registered.kernel.__name__} is not a cubin")
        with self._lock:
            self._kernels[number] = registered

    def _patch(self) -> None:
        """Makes the interpreter's own launches take turns, patch the language once, and trace accesses."""
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        load, store, execute = builder.create_masked_load, builder.create_masked_store, executor.__call__

        def traced_load(own: Any, pointers: Any, mask: Any, *others: Any, **named: Any) -> Any:
            self._access(pointers, mask, False)
            return load(own, pointers, mask, *others, **named)

        def traced_store(own: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
            self._access(pointers, mask, True)
            return store(own, pointers, value, mask, *others)

        def call_function(function: Any, *arguments: Any, **named: Any) -> Any:
            self._patch_language(function.fn)
            return function.rewrite()(*arguments, **named)

        def execute_alone(own: Any, *arguments: Any, **named: Any) -> Any:
            with self._lock:
                return execute(own, *arguments, **named)

        builder.create_masked_load, builder.create_masked_store = traced_load, traced_store
        for name in ("create_atomic_rmw", "create_atomic_cas"):
            setattr(builder, name, self._traced_atomic(getattr(builder, name)))
        interpreter.InterpretedFunction.__call__ = call_function
        executor.__call__ = execute_alone

    def _traced_atomic(self, method: Any) -> Any:
        def call(own: Any, *given: Any) -> Any:
            pointers = next(each for each in given if getattr(each, "dtype", None) is not None)
            self._access(pointers, None, False)
            self._access(pointers, None, True)
            return method(own, *given)

        return call

    def _access(self, pointers: Any, mask: Any, writes: bool) -> None:
        if self._trace is not None:
            chosen = np.ones_like(pointers.data, bool) if mask is None else mask.data
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            self._trace.access(pointers.data, chosen, size, writes)

    def _patch_language(self, function: Any) -> None:
        """Patches triton.language for a function, once: repeated patches take a third of the time."""
        if function not in self._patched:
            interpreter._patch_lang(function)
            self._patched.add(function)

    def _run(self, record: Any) -> int:
        """Runs a launch; called by the runtime. Returns 0, or 1 after an error."""
        try:
            with self._lock, np.errstate(all="ignore"):
                self._launch(record.contents)
        except BaseException:
            self.failures.append(traceback.format_exc())
            print(self.failures[-1], file=sys.stderr, flush=True)
            return 1
        return 0

    def _launch(self, record: _LaunchRecord) -> None:
        registered = self._kernels[record.image]
        arguments = registered.arguments(record)
        function = registered.kernel.rewrite()
        self._patch_language(registered.kernel.fn)
        builder, grid = interpreter.interpreter_builder, tuple(record.grid)
        builder.set_grid_dim(*grid)
        self._trace = _Trace(self._library, record.traced) if record.traced else None
        try:
            for index in itertools.product(*map(range, grid)):
                builder.set_grid_idx(*index)
                function(**arguments)
            if self._trace is not None:
                self._trace.report()
        finally:
            self._trace = None

    def _close(self) -> None:
        """Completes enqueued launches. Ends the process with an error if a launch failed."""
        self._library.fake_cuda_set_runner(None)
        if self.failures:
            print(f"{len(self.failures)} kernel launches failed", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_EXIT_STATUS_AFTER_FAILURE)


_instance: _Interpreter | None = None


def _the_interpreter() -> _Interpreter:
    global _instance
    if _instance is None:
        _instance = _Interpreter()
    return _instance


def register(
    image: bytes,
    kernel: Any,
    signature: Sequence[tuple[str, str]],
    constants: Mapping[str, Any] | Sequence[tuple[str, Any]],
) -> None:
    """Makes launches of a cubin run the kernel from which it was compiled.

    Args:
        image: The cubin.
        kernel: The `triton.jit` function.
        signature: The name and type of every run-time argument, in order.
        constants: The other arguments.

    Raises:
        ValueError: The image is not a cubin.
        TypeError: The kernel is not interpreted.
    """
    if not isinstance(kernel, interpreter.InterpretedFunction):
        raise TypeError(f"{kernel.__name__} is compiled: start the process with TRITON_INTERPRET=1")
    _the_interpreter().register(image, _Registered(kernel, tuple(signature), dict(constants)))


def failures() -> list[str]:
    """Returns the tracebacks of launches that failed. After the first, every call of the runtime fails."""
    return _the_interpreter().failures


def register_loaded(kernel_of: Callable[[KernelLaunch], Any]) -> None:
    """Makes launches run every kernel that a program loads: the one that `kernel_of` returns for it.

    The constant "label" is the kernel's name, and whether its form is that for pointers divisible by 16.
    """
    load = cubins.KernelLoader.load

    def load_and_register(self: cubins.KernelLoader, launch: KernelLaunch) -> Any:
        for index, cubin in enumerate(cubins.cubins(cubins.sources_of(launch), self.capability)):
            constants = {**dict(launch.constants), "label": (launch.name, index == 0)}
            register(cubin.image, kernel_of(launch), launch.signature, constants)
        return load(self, launch)

    mock.patch.object(cubins.KernelLoader, "load", load_and_register).start()
