"""A kernel to compile, perhaps generated, and its compilation for a GPU that need not be there."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpipe_fast.lower.launch import KernelSource

# The folder of Triton's disk cache; by default Triton's own.
FOLDER_VARIABLE = "GPIPE_FAST_CACHE"
_CONSTANT_TYPES = (bool, int, float, str, type(None))
_MAX_REASON = 1000
# The format of records in a cubin that have a size, and the attribute EIATTR_KPARAM_INFO.
_SIZED, _PARAMETER = 0x04, 0x17
# The name of the module of generated kernels, and of the source in their globals.
MODULE = "gpipe_fast.generated"
_SOURCE = "__gpipe_fast_source__"

_lock = threading.Lock()
_kernels: dict[str, Any] = {}


def kernel_of(name: str, text: str) -> Any:
    """Returns the kernel that a source defines; the same object for the same source.

    Args:
        name: the kernel's name in the source.
        text: the source of a module.

    Returns:
        A `triton.jit` function, whose name begins with ``generated.`` in recordings.
    """
    with _lock:
        if text not in _kernels:
            file = f"<gpipe_fast {name}>"
            # Triton reads a kernel's source with `inspect`, which looks here.
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
            namespace: dict[str, Any] = {"__name__": MODULE, _SOURCE: text}
            exec(compile(text, file, "exec"), namespace)
            _kernels[text] = namespace[name]
        return _kernels[text]


def generated_from(function: Any) -> str | None:
    """Returns the source of a generated kernel's Python function; None for another function."""
    found = getattr(function, "__globals__", {}).get(_SOURCE)
    return found if isinstance(found, str) else None


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel.

    Attributes:
        image: the machine code, an ELF file.
        name: the kernel's name in the image.
        num_warps: warps of one program.
        num_ctas: thread blocks of one program.
        shared: bytes of dynamic shared memory of one program.
        cooperative: whether all programs must run at the same time.
        launch_pdl: whether the kernel waits for the previous one itself (programmatic dependent launch).
    """

    image: bytes
    name: str
    num_warps: int
    num_ctas: int
    shared: int
    cooperative: bool
    launch_pdl: bool


@dataclass(frozen=True)
class CompileFailure:
    """The reason why a kernel has no machine code, in one paragraph."""

    reason: str


def cache_folder() -> str:
    """Returns the folder of Triton's disk cache. It begins with ~ if there is no home folder."""
    from triton import knobs

    return os.path.expanduser(os.environ.get(FOLDER_VARIABLE) or knobs.cache.dir)


def compile_kernel(source: KernelSource, capability: int) -> Any:
    """Compiles a kernel, or reads it from Triton's disk cache.

    Args:
        source: the kernel, its types and its constants.
        capability: the GPU's compute capability, 90 for 9.0.

    Returns:
        Triton's `CompiledKernel`.

    Raises:
        Exception: whatever Triton raises for a kernel that it cannot compile.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    # Attributes refer to arguments by their index in the kernel's signature.
    names = list(source.kernel.arg_names)
    types = dict(source.signature)
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in source.divisible}
    ast = ASTSource(
        source.kernel,
        {name: types.get(name, "constexpr") for name in names},
        dict(source.constants),
        attributes,
    )
    options = {
        "num_warps": source.num_warps,
        "num_stages": source.num_stages,
        "enable_fp_fusion": source.contracts,
    }
    return compile(ast, target=GPUTarget("cuda", capability, 32), options=options)


def refusal(source: KernelSource) -> str:
    """Returns why a source cannot be compiled, if that is known beforehand; else ""."""
    wrong = [f"{name} = {value!r}" for name, value in source.constants if type(value) not in _CONSTANT_TYPES]
    if wrong:  # the key of Triton's cache has their texts
        return f"constants must be bool, int, float, str or None, got {', '.join(wrong)}"
    named = {*dict(source.signature), *dict(source.constants)}
    if missing := [name for name in source.kernel.arg_names if name not in named]:
        return f"arguments without a type or a value: {', '.join(missing)}"
    try:
        key = getattr(source.kernel, "cache_key", "")
    except Exception as error:  # a function or variable that Triton does not allow in kernels
        return _reason(error)
    # What Triton returns after such an exception; kernels of one name would share it.
    return "Triton cannot hash the kernel's source" if key.startswith("recursion:") else ""


def cached(source: KernelSource, capability: int, folder: str) -> Cubin | None:
    """Returns a kernel from Triton's disk cache; None if it has none, or anything is wrong with it.

    Args:
        source: a source without a `refusal`.
        capability: the GPU's compute capability, 90 for 9.0.
        folder: the cache's folder, which may not exist.
    """
    if not hasattr(source.kernel, "cache_key"):  # Triton's interpreter runs it
        return None
    try:
        with _cache(folder, _only_reading()):
            found = _cubin(source, compile_kernel(source, capability))
    except Exception:
        return None
    return found if isinstance(found, Cubin) else None


def compile_here(source: KernelSource, capability: int, folder: str) -> Cubin | CompileFailure:
    """Compiles a kernel in this process, and keeps it in Triton's disk cache.

    Args:
        source: a source without a `refusal`, whose entry in the cache is absent or damaged.
        capability: the GPU's compute capability, 90 for 9.0.
        folder: the cache's folder.

    Returns:
        The cubin, or the reason why there is none.
    """
    from triton import knobs

    if not hasattr(source.kernel, "cache_key"):
        return CompileFailure(
            "Triton's interpreter runs the kernels of this process, which cannot compile them"
        )
    try:
        with _cache(folder), knobs.compilation.scope():
            knobs.compilation.always_compile = True
            return _cubin(source, compile_kernel(source, capability))
    except Exception as error:
        return CompileFailure(_reason(error))


@contextlib.contextmanager
def _cache(folder: str, manager: type | None = None) -> Iterator[None]:
    """Makes Triton use a folder as its disk cache, and a class that reads and writes it."""
    from triton import knobs

    with knobs.cache.scope():
        knobs.cache.dir = folder
        if manager is not None:
            knobs.cache.manager_class = manager
        yield


@functools.cache
def _only_reading() -> type:
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    class OnlyReading(FileCacheManager):  # type: ignore[misc]
        """Triton's disk cache, from which a compilation reads an entry, or ends."""

        def __init__(self, key: str) -> None:
            self.cache_dir = os.path.join(knobs.cache.dir, key)

        def get_group(self, filename: str) -> dict[str, str]:
            """Returns the files of an entry."""
            found: dict[str, str] | None = super().get_group(filename)
            if found is None:
                raise FileNotFoundError(f"Triton's disk cache has no {filename}")
            return found

    return OnlyReading


def _cubin(source: KernelSource, compiled: Any) -> Cubin | CompileFailure:
    metadata = compiled.metadata
    for name in ("global_scratch_size", "profile_scratch_size", "tensordesc_meta"):
        if value := getattr(metadata, name, None):
            return CompileFailure(f"the kernel needs {name} = {value}, which launches do not provide")
    image = compiled.asm["cubin"]
    found, passed = _parameter_sizes(image, metadata.name), _argument_sizes(source)
    if found != passed:
        return CompileFailure(f"its parameters' sizes are {found} bytes, but launches pass {passed}")
    return Cubin(
        image,
        metadata.name,
        metadata.num_warps,
        metadata.num_ctas,
        metadata.shared,
        bool(metadata.launch_cooperative_grid),
        bool(metadata.launch_pdl),
    )


def _parameter_sizes(image: bytes, name: str) -> list[int]:
    """Returns the bytes of each parameter of a kernel, from the section of its cubin that describes them.

    A cubin is a 64-bit ELF file. A record of the section is one byte each for its format and its attribute,
    and two bytes that are, in one of the formats, the size of what follows.
    """
    (sections,) = struct.unpack_from("<Q", image, 0x28)
    step, count, index_of_names = struct.unpack_from("<3H", image, 0x3A)
    found = [struct.unpack_from("<2I4Q", image, sections + i * step) for i in range(count)]
    names, wanted = found[index_of_names][4], f".nv.info.{name}\0".encode()
    sizes = {}
    for place, size in ((s[4], s[5]) for s in found if image.startswith(wanted, names + s[0])):
        end = place + size
        while place < end:
            format_, attribute, length = struct.unpack_from("<2BH", image, place)
            if (format_, attribute) == (_SIZED, _PARAMETER):
                _, ordinal, _, flags = struct.unpack_from("<I2HI", image, place + 4)
                sizes[ordinal] = flags >> 18
            place += 4 + length * (format_ == _SIZED)
    return [sizes[ordinal] for ordinal in sorted(sizes)]


def _argument_sizes(source: KernelSource) -> list[int]:
    """Returns the bytes of each argument that a launch passes; the last two point to scratch memory."""
    types = [*(type_ for _, type_ in source.signature), "*i8", "*i8"]
    return [8 if type_.startswith("*") else max(8, int(type_.lstrip("iufp"))) // 8 for type_ in types]


def _reason(error: BaseException) -> str:
    """Returns the type and the last lines of an error and of its cause, as one paragraph."""
    text = str(error)
    if error.__cause__ is not None and str(error.__cause__) not in text:
        text += f"\n{error.__cause__}"
    return f"{type(error).__name__}: {last_lines(text)}"


def last_lines(text: str) -> str:
    """Returns the last lines of an error's text or a process's output as one paragraph."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[-8:])[-_MAX_REASON:]
