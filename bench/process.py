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


def call(function: str, *arguments: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Calls a function in a new process that has one thread for operators, and returns its result.

    Args:
        function: "module:name". Arguments and result travel as JSON.
        arguments: positional arguments.
        environment: further environment variables.

    Raises:
        RuntimeError: the process failed; it has written why.
    """
    command = [sys.executable, "-W", "ignore", "-m", "bench.process", function, json.dumps(arguments)]
    variables = {"OMP_NUM_THREADS": "1", "GPIPE_FAST_PROGRESS": "0", **(environment or {})}
    done = subprocess.run(command, env=os.environ | variables, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{function}{arguments} ended with {done.returncode}: {done.stdout[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


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
