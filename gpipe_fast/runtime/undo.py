"""Changes that are undone, also if Ctrl-C arrives while they are made or undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


def run_and_undo(run: Callable[[], _Result], undo: Callable[[], None]) -> _Result:
    """Returns what ``run`` returns, after ``undo`` has undone its changes.

    A worker receives Ctrl-C as a ``KeyboardInterrupt`` at any function call, also at that of a context
    manager's ``__exit__``, whose code then does not run. So no context manager is used here.

    Args:
        run: a function that may raise.
        undo: undoes all changes, however far ``run`` has come; it is called twice if Ctrl-C interrupts it.
    """
    try:
        return run()
    finally:
        try:
            undo()
        except KeyboardInterrupt:
            undo()
            raise
