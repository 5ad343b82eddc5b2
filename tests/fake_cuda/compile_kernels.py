"""Compiles kernels for a process that interprets them: one process cannot do both.

`compile_kernels.py` serves requests from its standard input. A request and its answer are pickled: the
arguments of `compile_kernel`, and its result.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

CAPABILITY = 90
THREADS_PER_WARP = 32


class Compiled(NamedTuple):
    """A cubin: its bytes, the kernel's name, and bytes of dynamic shared memory."""

    image: bytes
    name: str
    shared_bytes: int


class Compiler:
    """A process that compiles kernels. It has neither the fake runtime nor the interpreter."""

    def __init__(self) -> None:
        left_out = ("LD_PRELOAD", "TRITON_INTERPRET", "FAKE_CUDA_LOG")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def compile(
        self,
        kernel: Any,
        signature: Sequence[tuple[str, str]],
        constants: Mapping[str, Any],
        options: Mapping[str, int],
    ) -> Compiled:
        """Compiles a kernel of a module, with no argument declared divisible by 16."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = (kernel.fn.__module__, kernel.fn.__name__, dict(signature), dict(constants), dict(options))
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        return Compiled(*pickle.load(self._process.stdout))

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def compile_kernel(
    module: str, name: str, signature: dict[str, str], constants: dict[str, Any], options: dict[str, int]
) -> Compiled:
    """Compiles a kernel, found by its module and name."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(module), name)
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, types, constants, {})
    compiled = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, THREADS_PER_WARP), options=options)
    return Compiled(compiled.asm["cubin"], compiled.metadata.name, compiled.metadata.shared)


def main() -> None:
    """Serves requests until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # modules may print
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(tuple(compile_kernel(*request)), answers)
        answers.flush()


if __name__ == "__main__":
    main()
