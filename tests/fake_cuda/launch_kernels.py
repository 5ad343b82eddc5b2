"""Launches Triton kernels on the fake CUDA runtime as C++ does: it loads cubins and copies arguments."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import gpipe_fast.kernels
from gpipe_fast.kernels.launch import Config
from gpipe_fast.lower.launch import number_type, pointer_type
from tests.fake_cuda import interpreter
from tests.fake_cuda.compile_kernels import THREADS_PER_WARP, Compiled, Compiler

_NUMBERS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float, "u1": ctypes.c_bool}
_MAX_DYNAMIC_SHARED_MEMORY = 8  # cudaFuncAttributeMaxDynamicSharedMemorySize
# Larger dynamic shared memory must be allowed explicitly.
DEFAULT_SHARED_BYTES = 48 * 1024
SUCCESS = 0


class Dim3(ctypes.Structure):
    """Numbers of blocks or threads along each dimension."""

    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class LaunchConfig(ctypes.Structure):
    """`cudaLaunchConfig_t`."""

    _fields_ = (
        ("grid", Dim3),
        ("block", Dim3),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class LoadedKernel:
    """A cubin that the runtime has loaded."""

    def __init__(self, compiled: Compiled, name: str | None = None) -> None:
        self.runtime = ctypes.CDLL(None)
        self.library, self.handle = ctypes.c_void_p(), ctypes.c_void_p()
        nothing = (None, None, 0, None, None, 0)
        self.load_status = self.runtime.cudaLibraryLoadData(
            ctypes.byref(self.library), compiled.image, *nothing
        )
        if self.load_status == SUCCESS:
            self.load_status = self.runtime.cudaLibraryGetKernel(
                ctypes.byref(self.handle), self.library, (name or compiled.name).encode()
            )

    def prepare(self) -> int:
        """Loads the kernel on the current device, which a capture may not do. Returns the status."""
        attributes = (ctypes.c_char * 1024)()
        status: int = self.runtime.cudaFuncGetAttributes(attributes, self.handle)
        return status

    def allow_shared_bytes(self, size: int) -> int:
        """Allows launches with this much dynamic shared memory on the current device. Returns the status."""
        status: int = self.runtime.cudaFuncSetAttribute(self.handle, _MAX_DYNAMIC_SHARED_MEMORY, size)
        return status

    def launch(self, grid: Sequence[int], threads: int, shared_bytes: int, arguments: Sequence[Any]) -> int:
        """Launches on the current stream. Returns the status.

        Args:
            grid: The number of programs along each dimension.
            threads: The number of threads of one program.
            shared_bytes: Dynamic shared memory of one program.
            arguments: ctypes numbers in the order of the parameters, without scratch pointers.
        """
        given = [*arguments, ctypes.c_void_p(), ctypes.c_void_p()]
        pointers = (ctypes.c_void_p * len(given))(*(ctypes.addressof(each) for each in given))
        stream = torch.cuda.current_stream().cuda_stream
        padded = [*grid, 1, 1, 1][:3]
        config = LaunchConfig(Dim3(*padded), Dim3(threads, 1, 1), shared_bytes, stream, None, 0)
        status: int = self.runtime.cudaLaunchKernelExC(ctypes.byref(config), self.handle, pointers)
        return status


class Launcher:
    """Launches kernels of gpipe_fast.kernels; compiles and registers each specialization once."""

    def __init__(self) -> None:
        self.launched: set[str] = set()
        self._compiler = Compiler()
        self._loaded: dict[Any, tuple[LoadedKernel, Compiled]] = {}

    def __call__(
        self, kernel: Any, grid: Sequence[int], config: Config, *arguments: Any, **constants: Any
    ) -> None:
        """Stands in for gpipe_fast.kernels.launch.launch."""
        if 0 in grid:
            return
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | constants | dict(config.blocks)
        run_time = [name for name in kernel.arg_names if _is_run_time(given, kernel, name)]
        signature = [(name, _type(given[name])) for name in run_time]
        fixed = {name: given[name] for name in kernel.arg_names if name not in dict(signature)}
        loaded, compiled = self._load(kernel, signature, fixed, config)
        values = [_argument(given[name], type_) for name, type_ in signature]
        status = loaded.launch(grid, THREADS_PER_WARP * config.num_warps, compiled.shared_bytes, values)
        assert status == SUCCESS, f"{kernel.__name__}: error {status}"
        self.launched.add(f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.__name__}")

    def load(
        self, kernel: Any, signature: Sequence[tuple[str, str]], constants: Mapping[str, Any], config: Config
    ) -> tuple[LoadedKernel, Compiled]:
        """Compiles, registers and loads a kernel."""
        compiled = self._compiler.compile(kernel, signature, constants, config.options())
        interpreter.register(compiled.image, kernel, signature, constants)
        loaded = LoadedKernel(compiled)
        assert loaded.load_status == SUCCESS
        if compiled.shared_bytes > DEFAULT_SHARED_BYTES:
            status = loaded.allow_shared_bytes(compiled.shared_bytes)
            assert status == SUCCESS, status
        assert loaded.prepare() == SUCCESS
        return loaded, compiled

    def _load(
        self, kernel: Any, signature: Sequence[tuple[str, str]], constants: Mapping[str, Any], config: Config
    ) -> tuple[LoadedKernel, Compiled]:
        key = (kernel.fn, tuple(signature), str(constants), str(config))
        if key not in self._loaded:
            self._loaded[key] = self.load(kernel, signature, constants, config)
        return self._loaded[key]

    def close(self) -> None:
        """Ends the compiler's process."""
        self._compiler.close()


def _is_run_time(given: Mapping[str, Any], kernel: Any, name: str) -> bool:
    return given[name] is not None and "constexpr" not in str(kernel.fn.__annotations__.get(name))


def _type(value: Any) -> str:
    return pointer_type(value.dtype) if isinstance(value, Tensor) else number_type(value)


def _argument(value: Any, type_: str) -> Any:
    return ctypes.c_void_p(value.data_ptr()) if isinstance(value, Tensor) else _NUMBERS[type_](value)


@contextlib.contextmanager
def launching_natively() -> Iterator[Launcher]:
    """Makes all kernels of gpipe_fast.kernels launch through the runtime."""
    launcher = Launcher()
    package = gpipe_fast.kernels
    names = [module.name for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
    with contextlib.ExitStack() as patches:
        for module in map(importlib.import_module, names):
            if hasattr(module, "launch") and module.__name__ != f"{package.__name__}.launch":
                patches.enter_context(mock.patch.object(module, "launch", launcher))
        yield launcher
    launcher.close()
