"""Measures cases in child processes: if a case crashes or hangs, a new process goes on with the next one."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.case_processes import CASE_SECONDS, ChildProcess, connect_to_parent, run_cases


def run(
    module: str,
    names: Sequence[str],
    seconds: float,
    keep: Callable[[str, Any, float], object],
    options: Sequence[str] = (),
    case_seconds: float = CASE_SECONDS,
) -> list[str]:
    """Runs cases, and returns those for which no time is left.

    Args:
        module: the module that calls `serve` in the child, after `--here`, the options and the names.
        names: names of the cases, in order.
        seconds: time limit for all cases.
        keep: receives each case when it ends: its name, its result or a text that says why it has none, and
            its seconds.
        options: further arguments of the module.
        case_seconds: time limit for one case.
    """
    command = [sys.executable, "-X", "faulthandler", "-m", module, "--here", *options]

    def ended(name: str, found: Sequence[Any] | str, taken: float) -> None:
        keep(name, found if isinstance(found, str) else found[0], taken)

    return run_cases(
        names, seconds, lambda left: ChildProcess([*command, *left]), ended, case_seconds=case_seconds
    )


def serve(names: Sequence[str], measure: Callable[[str], Any]) -> None:
    """Runs cases in this process, and sends their results, or what they raise, to the parent.

    Raises:
        RuntimeError: the device has become unusable.
    """
    send = connect_to_parent()
    for name in names:
        send(["begin", name])
        try:
            result = measure(name)
        except Exception as error:
            traceback.print_exc()
            result = failure(error)
        free()
        send(["end", name, result])


def failure(error: Exception) -> str:
    """Returns what went wrong, in one line."""
    return f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:400]}"


def free() -> None:
    """Waits for the device and frees unused memory, such as that of captured graphs."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
