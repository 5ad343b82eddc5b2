"""Calls functions in new processes, each with its own memory, threads and environment."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from bench.measure import ROOT


def call(function: str, *arguments: Any, environment: Mapping[str, str | None] | None = None) -> Any:
    """Calls a function in a new process that has one thread for operators, and returns its result.

    Args:
        function: "module:name". Arguments and result travel as JSON; what it prints is printed.
        arguments: positional arguments.
        environment: further environment variables; None removes one.

    Raises:
        RuntimeError: the process failed; it has written why.
    """
    command = [sys.executable, "-W", "ignore", "-m", "bench.process", function, json.dumps(arguments)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "GPIPE_FAST_PROGRESS": "0", **(environment or {})}
    kept = {name: value for name, value in variables.items() if value is not None}
    done = subprocess.run(command, env=kept, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{function}{arguments} ended with {done.returncode}: {done.stdout[-2000:]}")
    *printed, found = done.stdout.splitlines()
    print(*printed, sep="\n", end="\n" if printed else "", flush=True)
    return json.loads(found)


def main() -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, _, name = sys.argv[1].partition(":")
    found = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
    print(json.dumps(found), flush=True)
    # Skips destructors of static objects, which may run while autograd's threads are still alive.
    os._exit(0)


if __name__ == "__main__":
    main()
