"""C++ pipelines and the interpreter's exit: none may still run when the libraries it uses are torn down."""

from __future__ import annotations

import atexit
import weakref

from gpipe_fast._extension import Pipeline

_open: weakref.WeakSet[Pipeline] = weakref.WeakSet()


def open_pipeline(num_stages: int) -> Pipeline:
    """Makes a pipeline that is closed at exit, if it is still there."""
    pipeline = Pipeline(num_stages)
    _open.add(pipeline)
    return pipeline


@atexit.register
def _close_all() -> None:
    for pipeline in list(_open):
        pipeline.close()
