"""Runs Python programs in processes of their own without importing torch and gpipe_fast in each.

That import takes seconds, so each program is forked from an interpreter that has done it. Tests of imports
start a new interpreter with `subprocess`.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
# Beginnings of the names of variables that are read when an interpreter starts, or when torch is imported.
READ_AT_START = ("CUDA", "FAKE_CUDA_DEVICES", "LD_", "MKL", "OMP", "PYTHON", "PYTORCH", "TORCH_", "TRITON")
MAX_MESSAGE = 1 << 20
LOCK = threading.Lock()


def run_python(
    *arguments: str, warning: str = "", cwd: Path = ROOT, timeout: float = 300.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs the program ``python *arguments``, and returns what it prints and its exit status.

    Args:
        arguments: ``-c`` and a text, ``-m`` and a module, or a file; and the program's own arguments.
        warning: the option ``-W`` of the interpreter, such as ``ignore``.
        cwd: the folder in which the program runs.
        timeout: in seconds.
        variables: environment variables beside those of this process. PYTHONPATH is the root of the tree.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    at_start = {k: v for k, v in environment.items() if k.startswith(READ_AT_START)}
    with LOCK:
        _, server = _server(tuple(sorted(at_start.items())))
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        ours, theirs = socket.socketpair()
        with ours:
            request = json.dumps([arguments, warning, str(cwd), environment]).encode()
            with theirs:
                descriptors = [output.fileno(), errors.fileno(), theirs.fileno()]
                socket.send_fds(server, [request], descriptors)
            ours.settimeout(timeout)
            process = int(ours.recv(64))
            try:
                status = int(ours.recv(64))
            except TimeoutError:
                os.kill(process, signal.SIGKILL)
                raise
        for file in (output, errors):
            file.seek(0)
        command = [sys.executable, *(["-W", warning] if warning else []), *arguments]
        return subprocess.CompletedProcess(command, status, output.read(), errors.read())


def by_hand(done: subprocess.CompletedProcess[str], **variables: str) -> str:
    """Returns the line of a shell that runs a program again, for instance with ``-m pdb`` before its file."""
    settings = {"PYTHONPATH": str(ROOT)} | variables
    return shlex.join(["env", *(f"{name}={value}" for name, value in settings.items()), *done.args])


@functools.cache
def _server(
    at_start: tuple[tuple[str, str], ...],
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Returns an interpreter that forks programs, and the connection whose end ends it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(READ_AT_START)}
    program = f"import sys\nsys.path[0] = {str(ROOT)!r}\nfrom tests.programs import serve\n"
    program += f"serve({theirs.fileno()})"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=kept | dict(at_start),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    return process, ours


def serve(descriptor: int) -> None:
    """Forks a process for each request; returns in these processes, when their program has ended."""
    import torch._dynamo

    # No fork may use CUDA, such as the fake one that is preloaded, after its parent has looked for devices.
    with mock.patch.object(torch.cuda, "device_count", return_value=int("LD_PRELOAD" in os.environ)):
        import gpipe_fast  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as requests:
        while True:
            message, descriptors, *_ = socket.recv_fds(requests, MAX_MESSAGE, 3)
            if not message:
                return
            if os.fork() == 0:
                requests.close()
                break
            for each in descriptors:
                os.close(each)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output, errors, answer = descriptors
    process = os.fork()
    if process:
        os.write(answer, f"{process}".ljust(64).encode())
        _, status = os.waitpid(process, 0)
        with contextlib.suppress(BrokenPipeError):  # after the timeout
            os.write(answer, str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    os.close(answer)
    for number, each in ((1, output), (2, errors)):
        os.dup2(each, number)
        os.close(each)
    _run(*json.loads(message))


def _run(arguments: list[str], warning: str, cwd: str, environment: Mapping[str, str]) -> None:
    if warning:
        warnings._processoptions([warning])  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    what, *words = arguments
    if what == "-m":
        sys.path[0], sys.argv[:] = cwd, arguments[1:]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    # The program runs in the globals of `__main__`, which the interpreter clears when it ends.
    namespace: dict[str, Any] = sys.modules["__main__"].__dict__
    namespace.clear()
    namespace |= {"__name__": "__main__", "__builtins__": builtins}
    if what == "-c":
        sys.path[0], sys.argv[:] = "", ["-c", *words[1:]]
        code = compile(words[0], "<string>", "exec", dont_inherit=True)
    else:
        sys.path[0], sys.argv[:] = str(Path(what).parent), arguments
        namespace["__file__"] = what
        code = compile(Path(what).read_bytes(), what, "exec", dont_inherit=True)
    exec(code, namespace)
