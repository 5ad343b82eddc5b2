"""The name of a kernel, by which another process finds the same kernel."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gpipe_fast.fuse.generated import generated_from, kernel_of

_OWN_KERNELS = "gpipe_fast.kernels"
# The name under which another process runs the file of `__main__`, so that a script's guard is false.
_MAIN = "__gpipe_fast_main__"


class KernelNotFoundError(Exception):
    """A name does not lead to the kernel that has it; the text says why."""


@dataclass(frozen=True)
class KernelName:
    """Where a kernel is defined.

    Attributes:
        module: the module's name.
        file: the module's file, from which it is loaded if it cannot be imported by name.
        qualname: the kernel's qualified name in the module.
        source: `source_of` the kernel.
        text: the source of the module, if this process has generated it; then there is no file.
    """

    module: str
    file: str
    qualname: str
    source: str
    text: str = ""


def name_of(kernel: Any) -> KernelName | None:
    """Returns the name by which another process finds a kernel.

    Args:
        kernel: a `triton.jit` function, compiled or interpreted.

    Returns:
        None for a kernel that another process cannot find: one that a notebook's cell, `exec` or another
        function defines, or one of a script that runs all its code when it is imported.
    """
    function = _function_of(kernel)
    if text := generated_from(function):
        return KernelName(function.__module__, "", function.__qualname__, source_of(kernel), text)
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None or "<" in function.__qualname__:
        return None
    try:
        found = _function_of(_attribute(module, function.__qualname__))
    except AttributeError:
        return None
    if found is not function or os.path.realpath(function.__code__.co_filename) != os.path.realpath(file):
        return None
    source, name = source_of(kernel), module.__name__
    if not source:
        return None
    if name == "__main__":
        if not _has_guard(Path(file)):
            return None
        name = _MAIN if module.__spec__ is None else module.__spec__.name
    return KernelName(name, os.path.abspath(file), function.__qualname__, source)


def find(name: KernelName) -> Any:
    """Imports a kernel.

    Args:
        name: the kernel's name in the process that asks for it.

    Returns:
        The `triton.jit` function.

    Raises:
        KernelNotFoundError: the module cannot be imported, has no such kernel, or has another version of it.
    """
    try:
        kernel = kernel_of(name.qualname, name.text) if name.text else _attribute(_load(name), name.qualname)
    except Exception as error:
        raise KernelNotFoundError(
            f"{name.qualname} of {name.module} cannot be imported ({type(error).__name__}: {error}); "
            "the process that has it must compile it"
        ) from error
    while hasattr(getattr(kernel, "fn", None), "fn"):  # an autotuner or heuristics around the kernel
        kernel = kernel.fn
    source = source_of(kernel, name.source.partition(" ")[0])
    if source != name.source:
        raise KernelNotFoundError(
            f"{name.qualname} of {name.module} has changed since it was imported; "
            "the process that has the old version must compile it"
        )
    return kernel


def source_of(kernel: Any, kind: str | None = None) -> str:
    """Returns a hash of the sources that a kernel is compiled from.

    Args:
        kernel: a `triton.jit` function, compiled or interpreted.
        kind: which sources to hash. By default, the best that is known of the kernel:
            ``folder`` for gpipe_fast's own kernels: all files of their folder;
            ``text`` for generated kernels: their source, and all files of that folder;
            ``function``: the kernel and the functions that it calls, as Triton hashes them;
            ``file`` for an interpreted kernel, which Triton does not hash: the file that defines it.

    Returns:
        The kind and the hash, separated by a space; "" if Triton cannot hash the kernel.
    """
    function = _function_of(kernel)
    if kind is None and function.__module__.startswith(f"{_OWN_KERNELS}."):
        kind = "folder"
    if text := generated_from(function):
        return f"text {hashlib.sha256(f'{text} {_hash_of_own_kernels()}'.encode()).hexdigest()}"
    kind = kind or ("function" if hasattr(kernel, "cache_key") else "file")
    if kind == "folder":
        return f"folder {_hash_of_own_kernels()}"
    if kind == "function":
        return _hash_by_triton(kernel)
    return f"file {hashlib.sha256(_read(function.__code__.co_filename)).hexdigest()}"


def _hash_by_triton(kernel: Any) -> str:
    try:
        found = str(kernel.cache_key)
    except Exception:  # of a name that Triton does not allow in kernels, for example
        return ""
    # What Triton returns after such an exception.
    return "" if found.startswith("recursion:") else f"function {found}"


def _read(file: str) -> bytes:
    """Returns a file's contents; nothing of a file that is no longer there, or never was."""
    try:
        return Path(file).read_bytes()
    except OSError:
        return b""


@functools.lru_cache(maxsize=1)
def _hash_of_own_kernels() -> str:
    folder = Path(str(importlib.import_module(_OWN_KERNELS).__file__)).parent
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        contents = path.read_bytes()
        found.update(f"{path.name} {len(contents)}\n".encode() + contents)
    return found.hexdigest()


def _function_of(kernel: Any) -> Any:
    """Returns the Python function that a kernel is made of, without its decorators."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def _attribute(module: ModuleType, qualname: str) -> Any:
    return functools.reduce(getattr, qualname.split("."), module)


def _has_guard(file: Path) -> bool:
    """Returns whether a script has an ``if __name__ ==``: then it expects to be imported."""
    try:
        statements = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    tests = (ast.walk(node.test) for node in statements if isinstance(node, ast.If))
    return any(isinstance(node, ast.Name) and node.id == "__name__" for test in tests for node in test)


def _load(name: KernelName) -> ModuleType:
    """Imports the module of a kernel by its name, or else loads its file."""
    if name.module in sys.modules:
        return sys.modules[name.module]
    if name.module != _MAIN:
        try:
            return importlib.import_module(name.module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name.module}.".startswith(f"{error.name}."):
                raise  # the module exists; what it imports does not
    spec = importlib.util.spec_from_file_location(name.module, name.file)
    if spec is None or spec.loader is None:
        raise KernelNotFoundError(f"{name.file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name.module] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name.module]
        raise
    return module
